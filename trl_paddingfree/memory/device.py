"""The memory of the device that trains: how much there is, how much has been used, and that it ran out."""

import os
import re
import resource
import sys

import psutil
import torch

GIB = 2**30
# What `"auto"` leaves to the device's context, to kernels that need room of their own, and to fragmentation
MARGIN = 0.1
# What the libraries beneath PyTorch say of a failed allocation, in errors of no class of their own
_FAILURES = re.compile(r"can't allocate memory|out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)


def is_allocation_failure(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's own, or that of a library that it calls."""
    is_known = isinstance(error, RuntimeError) and _FAILURES.search(str(error)) is not None
    return isinstance(error, torch.OutOfMemoryError) or is_known


def budget_bytes(option: float | str, device: torch.device) -> int:
    """
    The bytes that `memory_budget` stands for.

    Args:
        option (`float` or `"auto"`):
            GiB, or what the device has less a margin and less what other processes use of it.
        device (`torch.device`):
            The device that trains. The memory of the CPU is divided among the processes of this machine.
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

    Args:
        device (`torch.device`):
            The device that trains.

    Examples:
    ```python
    >>> import torch
    >>> from trl_paddingfree.memory.device import PeakMemory
    >>> memory = PeakMemory(torch.device("cpu"))
    >>> memory.name, memory.highest > 0
    ('peak memory of the process', True)

    ```
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

    def reset(self) -> None:
        """Begin anew, on an accelerator: the peak of a process cannot be lowered."""
        if self.can_reset:
            self.before = self.highest
            torch.accelerator.reset_peak_memory_stats(self.device)
