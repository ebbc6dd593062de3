"""The memory of the device that trains: how much there is, and how much was used."""

import os
import resource
import sys

import psutil
import torch

GIB = 2**30
# The share that `"auto"` leaves to the device's context, to workspaces of kernels, and to fragmentation
MARGIN = 0.1


def has_accelerator() -> bool:
    """Whether there is a device to train on in TRL's default precision: that of Macs is left out."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"


def budget_bytes(option: float | str, device: torch.device) -> int:
    """
    `memory_budget` in bytes: it is in GiB, or with `"auto"` what other processes leave of `device`, less a margin. The
    free memory of a CPU is divided among the processes of this machine.

    Raises:
        `ValueError`: If it is more than the device has or, for the CPU, the machine.
    """
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        free, total, sharing = memory.available, memory.total, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        (free, total), sharing = torch.accelerator.get_memory_info(device), 1
    if option == "auto":  # what this process holds already, such as weights, counts against the budget
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
    The most memory in use so far: PyTorch's tensors on an accelerator, elsewhere the resident memory of this process.

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
        """Bytes that tensors hold now on an accelerator; 0 on the CPU, where nobody counts them."""
        return torch.accelerator.memory_allocated(self.device) if self.can_reset else 0

    def begin(self) -> int:
        """Reset the peak, and give the bytes that tensors hold now. The CPU does not: a process keeps its peak."""
        if not self.can_reset:
            return 0
        held, self.before = self.held, self.highest
        torch.accelerator.reset_peak_memory_stats(self.device)
        return held
