"""The memory of the device that trains: how much there is, and how much was used."""

import os
import resource
import sys

import psutil
import torch

GIB = 2**30
# The share that `"auto"` leaves for the device context, kernel workspaces and fragmentation
MARGIN = 0.1


def has_accelerator() -> bool:
    """Whether there is an accelerator that trains in TRL's default precision; MPS does not count."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"


def budget_bytes(option: float | str, device: torch.device) -> int:
    """
    Convert `memory_budget` from GiB to bytes. `"auto"` is what other processes leave of `device`, less a margin, and on
    a CPU divided among the processes of this machine.

    Raises:
        `ValueError`: If it is more than the device has or, for the CPU, the machine.
    """
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        free, total, sharing = memory.available, memory.total, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        (free, total), sharing = torch.accelerator.get_memory_info(device), 1
    if option == "auto":  # the budget includes what this process already holds, such as weights
        own = psutil.Process().memory_info().rss if device.type == "cpu" else torch.accelerator.memory_reserved(device)
        return int((1 - MARGIN) * (free + own) / sharing)
    asked = float(option)
    if asked * GIB > total:
        meant = f" Did you mean {asked / GIB:.1f}?" if total / 10 < asked <= total else ""
        raise ValueError(
            f"`memory_budget={option}` is in GiB, and more than the {total / GIB:.1f} GiB of {device}. Set at most "
            f"that, or 'auto'.{meant}"
        )
    return int(asked * GIB)


class PeakMemory:
    """
    Peak memory so far: of PyTorch's tensors on an accelerator, else the resident memory of this process.

    >>> memory = PeakMemory(torch.device("cpu"))
    >>> memory.name, memory.highest > 0
    ('peak memory of the process', True)
    """

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0  # bytes at the peak before the last `begin`
        self.can_reset = device.type != "cpu"
        self.name = "peak GPU memory" if self.can_reset else "peak memory of the process"

    @property
    def highest(self) -> int:
        """Bytes at the peak since the process began."""
        return max(self.before, self.peak)

    @property
    def peak(self) -> int:
        """Bytes at the peak since [`PeakMemory.begin`]."""
        if self.can_reset:
            return torch.accelerator.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def held(self) -> int:
        """Bytes that tensors hold now on an accelerator; 0 on the CPU, where they are not counted."""
        return torch.accelerator.memory_allocated(self.device) if self.can_reset else 0

    def begin(self) -> int:
        """Reset the peak and return the bytes that tensors hold now; 0 on the CPU, whose peak cannot be reset."""
        if not self.can_reset:
            return 0
        held, self.before = self.held, self.highest
        torch.accelerator.reset_peak_memory_stats(self.device)
        return held
