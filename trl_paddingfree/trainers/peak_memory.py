"""How much memory a process has used."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> tuple[str, float]:
    """
    The most memory in use so far.

    Args:
        device (`torch.device`):
            The device that trains.

    Returns:
        `tuple[str, float]`: What was measured, and how much, in GiB: PyTorch's tensors on a GPU, elsewhere the resident
        memory of this process.

    Examples:
    ```python
    >>> import torch
    >>> from trl_paddingfree.trainers.peak_memory import peak_memory
    >>> peak_memory(torch.device("cpu"))[0]
    'peak memory of the process'

    ```
    """
    if device.type == "cuda":
        return "peak GPU memory", torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return "peak memory of the process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
