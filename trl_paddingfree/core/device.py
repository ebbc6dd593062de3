"""The device that trains, and the most memory that was used on it."""

import resource
import sys

import torch

GIB = 2**30
_WITHOUT_FLOAT64 = ("mps",)


def has_accelerator() -> bool:
    """Whether there is an accelerator that trains in TRL's default precision; MPS does not count."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type != "mps"


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """Values in float64, on the CPU if their device has none."""
    return (values.cpu() if values.device.type in _WITHOUT_FLOAT64 else values).double()


class PeakMemory:
    """
    Peak memory so far: of PyTorch's tensors on an accelerator, else the resident memory of this process.

    >>> memory = PeakMemory(torch.device("cpu"))
    >>> memory.name, memory.highest > 0
    ('peak memory of the process', True)
    """

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0  # bytes at the peak before the last `begin`
        self.can_reset = device.type not in ("cpu", "mps")  # MPS counts nothing before PyTorch 2.15
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
        """Bytes that tensors hold now on an accelerator; 0 on the CPU and MPS, where they are not counted."""
        return torch.accelerator.memory_allocated(self.device) if self.can_reset else 0

    def begin(self) -> int:
        """Reset the peak, and return the bytes that tensors hold now; 0 on the CPU and MPS, which reset none."""
        if not self.can_reset:
            return 0
        held, self.before = self.held, self.highest
        torch.accelerator.reset_peak_memory_stats(self.device)
        return held
