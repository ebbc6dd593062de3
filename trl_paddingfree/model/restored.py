"""What trying a model changes of it and of the random state, put back afterwards."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


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
    """After this context, the random state of the CPU and of the GPUs of `model` is as it was before."""
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        yield
