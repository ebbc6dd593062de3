"""What trying a model changes of it and of the random state, put back afterwards."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def modes_restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """After this context, each of `modules` is in training or evaluation mode, as it was before."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def random_state_restored(model: torch.nn.Module) -> Iterator[None]:
    """After this context, the random state of the CPU and of the accelerators of `model` is as it was before."""
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")  # for none, any
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == accelerator.type}
    with torch.random.fork_rng(sorted(devices), device_type=accelerator.type):
        yield


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that lies on this device; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
