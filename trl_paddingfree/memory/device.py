"""The memory of the device that trains: how much there is, how much was used, and a pass in which it ran out."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from ..model.restored import gradients_dropped

GIB = 2**30
# What `"auto"` leaves to the device's context, to kernels that need room of their own, and to fragmentation
MARGIN = 0.1


def budget_bytes(option: float | str, device: torch.device) -> int:
    """
    The bytes that `memory_budget` stands for: GiB, or with `"auto"` what the device that trains has, less a margin and
    what other processes use of it. The memory of the CPU is divided among the processes of this machine.
    """
    if option != "auto":
        return int(float(option) * GIB)
    if device.type == "cpu":
        own = psutil.Process().memory_info().rss  # the weights are there already, and count against the budget
        usable = (psutil.virtual_memory().available + own) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        free, _ = torch.accelerator.get_memory_info(device)
        usable = free + torch.accelerator.memory_reserved(device)
    return int((1 - MARGIN) * usable)


class PeakMemory:
    """
    The most memory in use so far: PyTorch's tensors on an accelerator, elsewhere the resident memory of this process.

    >>> memory = PeakMemory(torch.device("cpu"))
    >>> memory.name, memory.highest > 0
    ('peak memory of the process', True)
    """

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0
        self.can_reset = device.type != "cpu"
        self.name = "peak GPU memory" if self.can_reset else "peak memory of the process"

    @property
    def highest(self) -> int:
        """Bytes, since the process began."""
        return max(self.before, self.current)

    @property
    def current(self) -> int:
        """Bytes, since the last reset."""
        if self.can_reset:
            return torch.accelerator.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def held(self) -> int:
        """Bytes that tensors hold now on an accelerator; 0 on the CPU, where nobody counts them."""
        return torch.accelerator.memory_allocated(self.device) if self.can_reset else 0

    def reset(self) -> None:
        """Begin anew, on an accelerator: the peak of a process cannot be lowered."""
        if self.can_reset:
            self.before = self.highest
            torch.accelerator.reset_peak_memory_stats(self.device)


class Attempt:
    """
    What a forward and backward pass changes, as it was before: gradients, metrics, the random state, and what the
    trainer names in `changed_by_loss`.

    Nothing is copied. A gradient that the pass has added to is whole, because each parameter is added to once; it is
    kept, and what a repeated pass computes for it is dropped. `sums` are those of metrics beside the trainer's own.
    """

    def __init__(self, trainer: Any, sums: dict | None = None):
        self.trainer, self.sums, self.sums_before = trainer, sums, {k: v.copy() for k, v in (sums or {}).items()}
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        # PyTorch counts the changes of each tensor
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in trained]
        self.metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self.tokens, self.counted = trainer._total_train_tokens, trainer.counts.new
        self.state = {name: vars(trainer)[name] for name in trainer.changed_by_loss}
        self.random = torch.get_rng_state()
        self.device = trainer.accelerator.device
        self.on_device: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self.device_random = None if self.on_device is None else self.on_device.get_rng_state(self.device)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within this context, what failed is computed again; afterwards every gradient counts once."""
        added = [(p, p.grad) for p, version in self.versions if p.grad is not None and p.grad._version != version]
        self.trainer._metrics["train"].clear()
        self.trainer._metrics["train"].update(self.metrics)
        self.trainer._total_train_tokens, self.trainer.counts.new = self.tokens, self.counted
        vars(self.trainer).update(self.state)
        if self.sums is not None:
            self.sums.clear()
            self.sums.update(self.sums_before)
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            self.on_device.set_rng_state(self.device_random, self.device)
            torch.accelerator.empty_cache()
        for parameter, _ in added:
            parameter.grad = None
        with gradients_dropped(parameter for parameter, _ in added):  # a second one might find no room
            yield
        for parameter, gradient in added:
            parameter.grad = gradient
