"""All tensors of a batch in one buffer, so that they reach the device in one copy, which the host does not wait for.

A batch has a dozen tensors of a few kilobytes each: a dozen copies cost the host more than their bytes, and from memory
that can be paged out each of them is waited for.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch

# Tensors begin at multiples of the largest element's size
_ALIGNMENT = 8


@dataclass(frozen=True)
class HasTensors:
    """A value whose fields hold tensors, or values that do."""

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with `fn` of each tensor, in a fixed order."""
        return replace(self, **{f.name: _mapped(vars(self)[f.name], fn) for f in fields(self) if f.init})


Holder = TypeVar("Holder", bound=HasTensors)


def _mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(_mapped(entry, fn) for entry in value)
    return value.map(fn) if isinstance(value, HasTensors) else value


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on `device`, in a copy that the host does not wait for."""
    return (tensor.pin_memory() if _is_accelerator(device) else tensor).to(device, non_blocking=True)


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def pinned(holder: Holder) -> Holder:
    """The same in one buffer of page-locked memory."""
    tensors = _tensors(holder)
    return _replaced(holder, tensors, _views(_packed(tensors), tensors))


def moved(holder: Holder, device: torch.device, non_blocking: bool) -> Holder:
    """
    The same on another device, or as it is if it is there. A copy from the CPU to an accelerator never waits.

    Parts are made beside a batch that has been moved: what is not on `device` is all on one other.
    """
    tensors = [
        x for x in _tensors(holder) if x.device.type != device.type or device.index not in (None, x.device.index)
    ]
    if not tensors:
        return holder
    if tensors[0].device.type != "cpu" or not _is_accelerator(device):
        return _replaced(holder, tensors, [x.to(device, non_blocking=non_blocking) for x in tensors])
    packed = _pinned_already(tensors)
    packed = _packed(tensors) if packed is None else packed
    return _replaced(holder, tensors, _views(packed.to(device, non_blocking=True), tensors))


def _tensors(holder: HasTensors) -> list[torch.Tensor]:
    """The distinct tensors of a holder, in order."""
    found: dict[int, torch.Tensor] = {}
    holder.map(lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def _replaced(holder: Holder, tensors: list[torch.Tensor], others: list[torch.Tensor]) -> Holder:
    """The holder with `others` in place of `tensors`, and the rest as it is."""
    place = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
    return holder.map(lambda tensor: place.get(id(tensor), tensor))


def _sizes(tensors: list[torch.Tensor]) -> list[int]:
    """Bytes that each tensor takes of the buffer."""
    return [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors]


def _pinned_already(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The buffer that the data loader has made of `tensors`: views of other dtypes do not know their base."""
    sizes, storage = _sizes(tensors), tensors[0].untyped_storage()
    places = [x.data_ptr() - storage.data_ptr() for x in tensors]
    is_buffer = storage.nbytes() == sum(sizes) and places == [0, *accumulate(sizes)][:-1] and tensors[0].is_pinned()
    return torch.empty(0, dtype=torch.uint8).set_(storage) if is_buffer else None


def _packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One buffer of page-locked memory with all of `tensors`."""
    buffer = torch.empty(sum(_sizes(tensors)), dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    for view, tensor in zip(_views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def _views(buffer: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a buffer that are laid out as `tensors`."""
    parts = zip(buffer.split(_sizes(tensors)), tensors, strict=True)
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]
