"""What may couple the examples of a micro-batch: then it is not divided, and its examples stay together."""

from collections.abc import Sequence
from itertools import takewhile
from types import FunctionType
from typing import Any

from .core import upstream
from .core.trainers.collated import Collated

# Methods of a trainer, and of its accelerator, between a micro-batch and its gradients
_OF_STEPS = (
    "training_step",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "compute_ref_log_probs",
    "_compute_kl_logps",
    "backward",
)
_LIBRARIES = ("trl_paddingfree", "trl", "transformers", "accelerate")


def may_couple(trainer: Collated, moves: bool = False) -> list[str]:
    """
    Options under which an example's loss depends on others, and what may change it beyond the class whose `part_sizes`
    say how parts of it combine. Empty if the losses of parts add up to that of the micro-batch or, if asked whether it
    `moves`, if examples may move to another one.
    """
    owners = [cls for cls in type(trainer).__mro__ if "part_sizes" in vars(cls)]
    owners += [trainer.trl_trainer] * (owners == [Collated])  # no one says how its parts combine
    found = own_steps(trainer, owners, moves)
    if not moves and type(trainer).part_sizes is Collated.part_sizes:
        found.append("a loss")
    return [*trainer.coupled_by(), *(f"{each} without `part_sizes`" for each in found)]


def own_steps(trainer: Any, owners: Sequence[type], moves: bool) -> list[str]:
    """
    What may make the gradients of a micro-batch any function of it: hooks; methods of the trainer itself, and of
    classes other than `owners`, their bases and this package's; and methods that were replaced in a library's class.
    What wraps the whole step counts only if it `moves` examples.
    """
    classes, accelerator = type(trainer).__mro__, trainer.accelerator
    ours = {cls for cls in classes if _package(cls) == "trl_paddingfree"}
    known = ours.union(type(accelerator).__mro__, *(cls.__mro__ for cls in owners))
    outer = () if moves else (trainer, *ours, *takewhile(lambda cls: cls not in known, classes))
    places = [(cls.__name__, cls) for cls in (*classes, *type(accelerator).__mro__)]
    found = [
        f"`{name}.{method}`"
        for name, place in (*places, ("trainer", trainer), ("accelerator", accelerator))
        for method in _OF_STEPS
        if method in vars(place) and not (method == "training_step" and place in outer)
        if place not in known or not is_published(place, method)
    ]
    # A class of the user's own with `part_sizes` says that hooks are linear, and those of DeepSpeed and PEFT are
    is_declared = owners[0] not in ours and "part_sizes" in vars(owners[0])
    if not is_declared and not trainer.is_deepspeed_enabled:
        if trainer.runtime.has_hooks is None:  # once per call of `train()`: models have thousands of modules
            trainer.runtime.has_hooks = not all(
                str(getattr(getattr(hook, "func", hook), "__module__", None)).startswith("peft.")  # also of partials
                for holder in (*trainer.model.parameters(), *trainer.model.modules())
                for hook in upstream.gradient_hooks(holder)
            )
        found += ["hooks on gradients"] * trainer.runtime.has_hooks
    return found


def is_published(cls: type, method: str) -> bool:
    """
    Whether a class has its own `method` as its library wrote it, with decorators of that library only. Of classes of no
    library, such as a user's, nothing says what it was.

    >>> from trl import DPOTrainer
    >>> is_published(DPOTrainer, "_compute_loss")
    True
    """
    package, function = _package(cls), vars(cls)[method]
    if package not in _LIBRARIES:
        return True
    while isinstance(function, FunctionType) and _package(function) == package:
        # Decorators copy names, but not where they were defined
        if function.__globals__.get("__name__", "").partition(".")[0] != package:
            return False
        if "__wrapped__" not in vars(function):
            return (function.__module__, function.__qualname__) == (cls.__module__, f"{cls.__qualname__}.{method}")
        function = vars(function)["__wrapped__"]
    return False


def _package(defined: Any) -> str:
    """The package in which a class or a function says that it was defined."""
    return str(defined.__module__).partition(".")[0]
