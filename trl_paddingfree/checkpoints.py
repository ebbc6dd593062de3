"""Checkpoints of runs that died: which of them are whole."""

import json
from pathlib import Path

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
    >>> from trl_paddingfree.checkpoints import checkpoint_to_resume
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
