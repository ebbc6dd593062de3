"""Checkpoints that are whole, and runs that resume from the newest of them."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def state_file(output_dir: str, step: int) -> Path:
    """The file that is written last into the checkpoint of a step."""
    return Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}" / TRAINER_STATE_NAME


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: its trainer state, which comes last, can be read."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """
    The checkpoint that `resume_from_checkpoint` stands for.

    Args:
        resume_from_checkpoint (`str` or `bool`, *optional*):
            As for [`~transformers.Trainer.train`]. `True`, which a command line gives as `"true"`, is the newest
            checkpoint that is whole: the process may have died, or the disk been full, while the last was written.
        output_dir (`str`):
            Folder of the checkpoints.

    Raises:
        `ValueError`: If the checkpoint is not whole, or no checkpoint is.

    Examples:
    ```python
    >>> from trl_paddingfree.trainers.checkpoints import checkpoint_to_resume
    >>> checkpoint_to_resume(None, "out") is None
    True

    ```
    """
    if not resume_from_checkpoint:
        return None
    newest_first = sorted(
        (path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()),
        key=lambda path: -int(path.name.split("-")[-1]),
    )
    whole = next(filter(is_whole, newest_first), None)
    if resume_from_checkpoint is True or str(resume_from_checkpoint).lower() == "true":
        if whole is None:
            raise ValueError(
                f"`resume_from_checkpoint=True`, and {output_dir!r} has no complete checkpoint: leave it out to start "
                "from the beginning."
            )
        return str(whole)
    if not is_whole(Path(resume_from_checkpoint)):
        instead = f"{str(whole)!r} is complete" if whole else "Leave it out to start from the beginning"
        raise ValueError(
            f"`resume_from_checkpoint={resume_from_checkpoint!r}` is no complete checkpoint: its trainer state, which "
            f"is written last, is missing or cut off. {instead}."
        )
    return resume_from_checkpoint


class WholeCheckpoints(Trainer):
    """The part of the padding-free trainers that leaves no checkpoint half written, and resumes from a whole one."""

    args: Any
    names_differ = False  # between the last checkpoint that was loaded and the model

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:  # a checkpoint that is written anew is not whole until it is whole again
            state_file(self.args.output_dir, self.state.global_step).unlink(missing_ok=True)
        super()._save_checkpoint(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The trainer state, written next, says that a checkpoint is whole: what other processes write is part of it
        self.accelerator.wait_for_everyone()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Models with images or experts have other names in files than in memory, which transformers' trainer does not
        # know: it warns, and goes on with the weights that the model was made with
        self.names_differ = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self.names_differ:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_by_name(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_by_name(self.state.best_model_checkpoint, self.model)

    def _load_by_name(self, checkpoint: Any, model: Any) -> None:
        """Load the weights that a checkpoint has under other names, as `from_pretrained` finds them."""
        if not self.names_differ:
            return
        self.names_differ = False
        loaded, found = type(model).from_pretrained(
            checkpoint, config=deepcopy(model.config), dtype=model.dtype, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"The checkpoint {checkpoint!r} has no weights for {', '.join(missing[:3])} and "
                f"{len(missing[3:])} others of {type(model).__name__}: it is one of another model."
            )
        model.load_state_dict(loaded.state_dict())
