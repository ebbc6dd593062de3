"""Contexts that restore what changes within, whether a forward is still ours, and the local shard of a tensor."""

import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch.distributed.tensor import DTensor

# An object, the name of an attribute, and its value for a time
Change = tuple[object, str, object]


@contextmanager
def attributes_set(values: Iterable[Change]) -> Iterator[None]:
    """Sets attributes of objects within the context; restores them afterwards, or deletes those that were not there."""
    with ExitStack() as restored:
        for holder, name, value in values:
            held = vars(holder)
            if name in held:
                restored.callback(held.__setitem__, name, held[name])
            else:
                restored.callback(held.pop, name)
            held[name] = value
        yield


@contextmanager
def buffers_restored(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restores buffers after the context, such as counters and "dynamic" RoPE frequencies."""
    modules = [*modules]
    buffers = [
        (module, name, x, x.clone())
        for module in modules
        for name, x in module.named_buffers(recurse=False)
        # No forward changes packed weights and masks, which may be as large as everything else
        if x.is_floating_point() or x.ndim < 2
    ]
    # What rotary embeddings note of their frequencies; of those of a kind of layers, nothing before they first change
    ends = "max_seq_len_cached", "attention_scaling"
    notes = [(held, {k: x for k, x in held.items() if k.endswith(ends)}) for held in map(vars, modules)]
    try:
        yield
    finally:
        for held, kept in notes:
            for name in [*held]:
                if name.endswith(ends):
                    del held[name]
            held.update(kept)
        for module, name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            setattr(module, name, buffer)


@contextmanager
def random_state_restored(model: torch.nn.Module, of_users: bool = True) -> Iterator[None]:
    """
    Restores PyTorch's random state of the CPU and of the accelerators of `model` after the context. Also those of
    Python and NumPy, if code `of_users` may draw from them.
    """
    kind, devices = _accelerators_of(model)
    with torch.random.fork_rng(devices, device_type=kind), ExitStack() as restored:
        if of_users:
            restored.callback(random.setstate, random.getstate())
            restored.callback(np.random.set_state, np.random.get_state())
        yield


def random_state(model: torch.nn.Module) -> list[torch.Tensor]:
    """PyTorch's random state of the CPU and of the accelerators of `model`."""
    kind, devices = _accelerators_of(model)
    return [torch.get_rng_state(), *(torch.get_device_module(kind).get_rng_state(index) for index in devices)]


def _accelerators_of(model: torch.nn.Module) -> tuple[str, list[int]]:
    """The type of accelerator, and the indices of those that `model` is on."""
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")  # without one, any will do
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == accelerator.type}
    return accelerator.type, sorted(devices)


def mark_of(module: torch.nn.Module, name: str) -> object:
    """The attribute `name` of the forward that we gave a module; `None` if it was replaced since, or never set."""
    # Wrappers that copy attributes have the mark themselves; others are unwrapped
    innermost = inspect.unwrap(module.forward, stop=lambda function: name in vars(function))
    return vars(innermost).get(name)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a distributed tensor on this device; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
