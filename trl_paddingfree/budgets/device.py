"""How many bytes a memory budget stands for."""

import os

import psutil
import torch

from ..core.device import GIB

# The share that `"auto"` leaves for the device context, kernel workspaces and fragmentation
MARGIN = 0.1


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
        whose = (
            f"this machine's {total / GIB:.1f} GiB"
            if device.type == "cpu"
            else f"the {total / GIB:.1f} GiB of {device}"
        )
        raise ValueError(
            f"`memory_budget={option}` is in GiB, and more than {whose}. Set at most that, or 'auto'.{meant}"
        )
    return int(asked * GIB)
