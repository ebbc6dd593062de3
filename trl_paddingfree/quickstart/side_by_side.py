"""TRL's trainer and ours, made from the same arguments, and whatever both log compared."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers import PrinterCallback

from ..trainers import TRAINERS

# Figures that only one side has, or that are times
INCOMPARABLE = ("flat/", "runtime", "per_second", "total_flos", "step_time")
ON_CPU = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
_SILENT = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


@dataclass
class Trajectory:
    """What one training run logged and ended with."""

    log_history: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    trainer: Any

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step."""
        return [entry["loss"] for entry in self.log_history if "loss" in entry]


def has_accelerator() -> bool:
    """Whether there is a device to train on in TRL's default precision: that of Macs is left out."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != "mps"


def classes_of(task: str, ours: bool) -> tuple[Any, Any]:
    """The trainer of a task and its configuration: this package's, or TRL's."""
    trainer = TRAINERS[task]
    return (trainer, trainer.config_class) if ours else (trainer.trl_trainer, trainer.trl_config)


def make_trainer(trainer_class: Any, config_class: Any, options: dict[str, Any], **arguments: Any) -> Any:
    """
    A trainer that logs every step, and neither prints nor saves.

    Args:
        trainer_class (`type`):
            TRL's trainer or ours.
        config_class (`type`):
            Its configuration.
        options (`dict[str, Any]`):
            Fields of the configuration. On a machine without an accelerator, those that TRL asks for are added.
        **arguments:
            Arguments of the trainer.
    """
    defaults = {**_SILENT, **({} if has_accelerator() else ON_CPU), **options}
    defaults.setdefault("output_dir", tempfile.mkdtemp(prefix="trl_paddingfree_"))
    trainer = trainer_class(args=config_class(**defaults), **arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer_class: Any, config_class: Any, options: dict[str, Any], **arguments: Any) -> Trajectory:
    """Train with what [`make_trainer`] makes. The weights are the trained ones, and not copied."""
    trainer = make_trainer(trainer_class, config_class, options, **arguments)
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return Trajectory(trainer.state.log_history, weights, trainer)


def difference(expected: Any, actual: Any, floor: float = 1.0) -> float:
    """
    How far a figure or a tensor is from another: the largest difference, over the largest expected value.

    Args:
        expected (`float`, `torch.Tensor` or `None`):
            What padded TRL has. `None` is TRL's mean over nothing, and equals NaN.
        actual (`float`, `torch.Tensor` or `None`):
            What is compared with it.
        floor (`float`, *optional*, defaults to `1.0`):
            What smaller values are compared with in place of themselves: a figure near zero is the rounding of the
            larger ones that it comes from.

    Returns:
        `float`: Infinite where only one of both is a number.

    Examples:
    ```python
    >>> from trl_paddingfree.quickstart.side_by_side import difference
    >>> difference(-4.0, -5.0), difference(0.5, 0.75)
    (0.25, 0.25)
    >>> difference(None, 0.5)
    inf

    ```
    """
    a, b = (torch.as_tensor(math.nan if x is None else x, dtype=torch.float64) for x in (expected, actual))
    scale = torch.where(a.isfinite(), a.abs(), 0.0).amax().clamp(min=floor)
    off = ((a - b).abs() / scale).nan_to_num(math.inf, math.inf)
    return float(off.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).amax())


def differences(
    padded: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], floor: float = 1.0
) -> dict[str, float]:
    """
    The largest difference over all logs, of every figure that padded TRL logs; infinite where ours lacks one.

    Args:
        padded (`Sequence[dict[str, Any]]`):
            The figures of each step, by padded TRL.
        ours (`Sequence[dict[str, Any]]`):
            The figures of the same steps.
        floor (`float`, *optional*, defaults to `1.0`):
            See [`difference`].
    """
    found: dict[str, float] = {}
    nothing: dict[str, Any] = {}
    for expected, actual in zip_longest(padded, ours, fillvalue=nothing):
        for name in (name for name in expected if not any(part in name for part in INCOMPARABLE)):
            off = difference(expected[name], actual[name], floor) if name in actual else math.inf
            found[name] = max(found.get(name, 0.0), off)
    return found
