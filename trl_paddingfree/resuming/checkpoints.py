"""Checkpoints: whether they are complete, which to resume from, renamed weights; and the model card."""

import json
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .. import __version__
from ..core.flat.counts import BatchCounts
from ..core.model.restored import attributes_set

# Appended to TRL's model card
MODEL_CARD = """

### Without padding

trl-paddingfree {version} computed the batches: {method}. The losses and gradients are those of TRL's padded
batches{share}. Cite it as:

```bibtex
@software{{trl_paddingfree,
  title   = {{{{trl-paddingfree: padding-free and prefix-shared training on TRL}}}},
  version = {{{version}}},
  year    = {{2026}}
}}
```
"""


def append_to_card(output_dir: str, method: str, computed: BatchCounts) -> None:
    """Append to the model card how batches were computed, and what share of the padded slots."""
    share = f", of whose slots it computed {computed.computed / computed.padded:.0%}" if computed.padded else ""
    with (Path(output_dir) / "README.md").open("a", encoding="utf-8") as card:
        card.write(MODEL_CARD.format(version=__version__, method=method, share=share))


def _step_of(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: its trainer state, which is written last, can be read."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def checkpoint_to_resume(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | bool | None:
    """
    Resolve `resume_from_checkpoint` of [`~transformers.Trainer.train`]. `True`, or `"true"` from a command line, is the
    newest complete checkpoint in `output_dir`: the process may have died, or the disk filled up, while the last one was
    written. Refuses an incomplete one.
    """
    if not resume_from_checkpoint:
        return None
    paths = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step_of(path).isdigit()]
    whole = next(filter(is_whole, sorted(paths, key=lambda path: -int(_step_of(path)))), None)
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


def invalidate(output_dir: str, step: int) -> None:
    """Mark the checkpoint of a step, if there is an older one, as incomplete."""
    (Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}" / TRAINER_STATE_NAME).unlink(missing_ok=True)


def naming_weights(trainer: Any, checkpoint: Any, model: Any) -> AbstractContextManager[None]:
    """
    Within this context, `trainer` loads weights that have other names in a checkpoint than in memory, as for models
    with images or experts. transformers' trainer only warns, and goes on with the weights that the model had before.
    """

    def load_by_name(load_result):
        if not load_result.missing_keys or not load_result.unexpected_keys:
            warn(load_result)
            return
        loaded, report = type(model).from_pretrained(
            checkpoint, config=deepcopy(model.config), dtype=model.dtype, output_loading_info=True
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"The checkpoint {checkpoint!r} has no weights for {', '.join(missing[:3])} and {len(missing[3:])} "
                f"others of {type(model).__name__}: it is one of another model."
            )
        model.load_state_dict(loaded.state_dict())

    warn = trainer._issue_warnings_after_load
    return attributes_set([(trainer, "_issue_warnings_after_load", load_by_name)])
