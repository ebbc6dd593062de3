"""Random numbers come from a generator of the device within [`own_generator`], and else from the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_generator: torch.Tensor | None = None  # the state of the device's own, if it has one


@contextmanager
def own_generator() -> Iterator[None]:
    """Within this context, the device has a generator of its own, as CUDA does, and values are not the CPU's."""
    global _generator
    _generator = torch.get_rng_state()
    try:
        yield
    finally:
        _generator = None


@contextmanager
def drawing() -> Iterator[None]:
    global _generator
    if _generator is None:
        yield
        return
    host = torch.get_rng_state()
    torch.set_rng_state(_generator)
    try:
        yield
    finally:
        _generator = torch.get_rng_state()
        torch.set_rng_state(host)


def seed_all(seed: int) -> None:
    """Seed the device's own generator, if it has one."""
    global _generator
    if _generator is not None:
        _generator = torch.Generator().manual_seed(seed).get_state()


def get_state() -> torch.Tensor:
    """The state of the generator that the device draws from."""
    return torch.get_rng_state() if _generator is None else _generator.clone()


def set_state(state: torch.Tensor) -> None:
    """Have the device draw from a state on."""
    global _generator
    if _generator is None:
        torch.set_rng_state(state)
    else:
        _generator = state.clone()
