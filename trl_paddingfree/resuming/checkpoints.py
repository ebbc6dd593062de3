"""Checkpoints: whether they are complete, which to resume from, renamed weights."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..core.model.restored import attributes_set
from ..hub import why_unreadable

logger = logging.get_logger(__name__)

# The files or folders that hold the weights, the state of the optimizer by the engine that saved it, and the rest
_WEIGHTS = ("*.safetensors", "*/adapter_model.*", "adapter_model.bin", "pytorch_model*", "*.index.json", "global_step*")
_OPTIMIZER = {
    "no": ("optimizer.pt",),
    "fsdp": ("optimizer.bin", "optimizer*/", "rank*-of-*-optimizer.pt"),
    "deepspeed": ("global_step*",),
}
_SCHEDULER = ("scheduler.pt", "global_step*")
_RANDOM = ("rng_state*.pth",)
# The files whose headers or directories are read
_LOADED = (
    *("*.safetensors", "*/adapter_model.safetensors", "*/adapter_model.bin", "adapter_model.bin", "pytorch_model*.bin"),
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "global_step*/*.pt"),
)
_ONLY_MODEL = " With `save_only_model=True`, training goes on from weights alone, with a new optimizer and schedule."


def _step_of(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: its trainer state, which is written last, can be read."""
    return not _of_state(checkpoint)


def _of_state(checkpoint: Path) -> str:
    """What is wrong with the trainer state of a checkpoint; empty if nothing is."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = None
    return "" if isinstance(state, dict) else f"{TRAINER_STATE_NAME}, which is written last, is missing or cut off"


def _has_any(checkpoint: Path, patterns: Sequence[str]) -> bool:
    return any(True for pattern in patterns for _ in checkpoint.glob(pattern))


def _unreadable(file: Path) -> str:
    """Why the tensors of a file cannot be loaded, as its header or directory tells; empty if they can."""
    try:
        if file.suffix == ".safetensors":
            return why_unreadable(file)
        with ZipFile(file):  # as `torch.save` writes it: the directory stands at the end
            return ""
    except (OSError, BadZipFile) as error:
        return f"{type(error).__name__}: {error}"


def problem_of(checkpoint: Path, only_model: bool = False, engine: str | None = None) -> str:
    """
    Why training cannot resume from a checkpoint; empty if it can. Of the files that will be loaded, only headers and
    directories are read.

    Args:
        checkpoint (`Path`):
            The folder.
        only_model (`bool`, *optional*, defaults to `False`):
            Whether weights are enough, as `save_only_model` leaves them. transformers would go on without a word.
        engine (`str`, *optional*):
            What computes the run: `"no"`, `"fsdp"` or `"deepspeed"`. `None`: not known yet, any will do.
    """
    if problem := _of_state(checkpoint):
        return problem
    needed: dict[str, Sequence[str]] = {"weights": _WEIGHTS}
    if not only_model:
        optimizer = [pattern for name, patterns in _OPTIMIZER.items() if engine in (None, name) for pattern in patterns]
        needed |= {optimizer[0]: optimizer, "scheduler.pt": _SCHEDULER, "rng_state.pth": _RANDOM}
    for what, patterns in needed.items():
        if not _has_any(checkpoint, patterns):
            return f"it has no {what}"
    for index in checkpoint.glob("*.index.json"):
        try:
            named = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{index.name} is damaged"
        if missing := sorted(name for name in named if not (checkpoint / name).is_file()):
            return f"{missing[0]}, which {index.name} names, is missing"
    for file in sorted({file for pattern in _LOADED for file in checkpoint.glob(pattern)}):
        if problem := _unreadable(file):
            return f"{file.relative_to(checkpoint)} is damaged ({problem})"
    return ""


def checkpoint_to_resume(
    resume_from_checkpoint: str | bool | None, output_dir: str, only_model: bool = False, engine: str | None = None
) -> str | bool | None:
    """
    Resolve `resume_from_checkpoint` of [`~transformers.Trainer.train`]. `True`, or `"true"` from a command line, is the
    newest complete checkpoint in `output_dir`: the process may have died, or the disk filled up, while the last one was
    written. Refuses an incomplete or damaged one. `only_model` and `engine` are those of [`problem_of`].
    """
    if not resume_from_checkpoint:
        return None
    is_any = resume_from_checkpoint is True or str(resume_from_checkpoint).lower() == "true"
    named = None if is_any else Path(str(resume_from_checkpoint))
    if named is not None and not (problem := problem_of(named, only_model, engine)):
        return resume_from_checkpoint
    paths = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step_of(path).isdecimal()]
    whole, problems = None, []
    for path in sorted(paths, key=lambda path: -int(_step_of(path))):
        if not (found := problem_of(path, only_model, engine)):
            whole = str(path)
            break
        problems.append(f"{path.name}: {found}")
    weights_only = "" if only_model else _ONLY_MODEL
    if named is not None:
        instead = f"{whole!r} is complete" if whole else "Leave it out to start from the beginning"
        advice = weights_only if problem.startswith("it has no ") else ""
        raise ValueError(
            f"`resume_from_checkpoint={resume_from_checkpoint!r}` is not a complete checkpoint: {problem}. "
            f"{instead}.{advice}"
        )
    if whole is None:
        found = f" ({'; '.join(problems[:3])})" if problems else ""
        advice = weights_only if any(": it has no " in problem for problem in problems) else ""
        raise ValueError(
            f"`resume_from_checkpoint=True`, and {output_dir!r} has no complete checkpoint{found}: leave it out to "
            f"start from the beginning.{advice}"
        )
    if problems:
        logger.warning(f"Resuming from {whole}, the newest complete checkpoint, and not from {'; '.join(problems)}.")
    return whole


def found_together(find: Callable[[], str | bool | None]) -> str | bool | None:
    """
    The checkpoint that `find` returns on all processes, which may have file systems of their own. Where one refuses its
    own, or has another, all refuse: they would wait for it.
    """
    found, refused = None, None
    try:
        found = find()
    except (ValueError, OSError) as error:  # of what is there, or of what may not be read
        refused = error
    names = gather_object([None if refused else Path(str(found)).name])
    if refused is not None:
        raise refused
    if len({*names}) > 1:
        listed = ", ".join(sorted({name or "none" for name in names}))
        raise ValueError(
            f"Processes resume from different checkpoints ({listed}), the newest complete ones that they find: name "
            "one that all have by `resume_from_checkpoint`."
        )
    return found


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
                f"others of {type(model).__name__}: it belongs to another model."
            )
        model.load_state_dict(loaded.state_dict())

    warn = trainer._issue_warnings_after_load
    return attributes_set([(trainer, "_issue_warnings_after_load", load_by_name)])
