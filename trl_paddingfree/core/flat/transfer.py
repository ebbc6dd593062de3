"""Packs all tensors of a batch into one pinned buffer, so that they reach the device in one asynchronous copy.

A batch has a dozen tensors of a few kilobytes each: a dozen copies cost the host more than their bytes do, and from
pageable memory, the host waits for each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Self

import torch

Tensors = list[torch.Tensor]
# They are aligned to this many bytes, as kernels with vectorized loads expect
_ALIGNMENT = 16


@dataclass(frozen=True)
class HasTensors:
    """A dataclass whose fields hold tensors, or values that do."""

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A copy with `fn` applied to each tensor, always in the same order."""
        return replace(self, **{f.name: _mapped(vars(self)[f.name], fn) for f in fields(self)})

    def pin_memory(self) -> Self:
        """A copy in one buffer of pinned memory. PyTorch's data loader calls this method by name."""
        tensors = self._tensors()
        return self._with(tensors, _views(_packed(tensors), tensors))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """A copy on another device, or `self` if it is there. To an accelerator: in one asynchronous copy."""
        to = torch.device(device)
        tensors = [x for x in self._tensors() if x.device.type != to.type or to.index not in (None, x.device.index)]
        if not tensors:
            return self
        if tensors[0].device.type != "cpu" or not _is_accelerator(to):  # tensors to move are all on one device
            return self._with(tensors, [x.to(to, non_blocking=non_blocking) for x in tensors])
        return self._with(tensors, _views(_pinned(tensors).to(to, non_blocking=True), tensors))

    def _tensors(self) -> Tensors:
        """The distinct tensors, in order."""
        distinct: dict[int, torch.Tensor] = {}
        self.map(lambda tensor: distinct.setdefault(id(tensor), tensor))
        return list(distinct.values())

    def _with(self, tensors: Tensors, others: Tensors) -> Self:
        """A copy with `others` in place of `tensors`."""
        other_of = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
        return self.map(lambda tensor: other_of.get(id(tensor), tensor))


class Arriving:
    """
    Results on their way to the host, in order, and what to do with each. Nothing waits for them before they are read.
    Copies of their owner get a new one.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Event, Callable[[torch.Tensor], None]]] = []

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    @torch.compiler.disable
    def add(self, results: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        """Have `then` take `results` on the CPU: at once if they are there, otherwise when they have arrived."""
        self.read(waits=False)  # what has arrived by now: a custom training loop may never `read`
        if results.is_cpu:
            then(results)
        elif not results.is_meta:  # those have no values
            on_host = results.to("cpu", non_blocking=True)  # into pinned memory, if the device has it
            # On the stream of the copy: the model may be on another device than the current one
            self.pending.append((on_host, torch.accelerator.current_stream(results.device).record_event(), then))

    def read(self, waits: bool = True) -> None:
        """Take all results, and wait for those that have not arrived; if not `waits`, only those that have arrived."""
        while self.pending and (waits or self.pending[0][1].query()):
            results, arrival, then = self.pending.pop(0)
            arrival.synchronize()
            then(results)


def _mapped(value: object, fn: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if torch.is_tensor(value):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(_mapped(entry, fn) for entry in value)
    return value.map(fn) if isinstance(value, HasTensors) else value


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, copied there asynchronously."""
    return (tensor.pin_memory() if _is_accelerator(device) else tensor).to(device, non_blocking=True)


def _is_accelerator(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type


def _sizes(tensors: Tensors) -> list[int]:
    """Bytes that each tensor takes in the buffer."""
    return [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in tensors]


def _pinned(tensors: Tensors) -> torch.Tensor:
    """The buffer that `pin_memory` made of `tensors`, recognized by their addresses, or a new one."""
    sizes, storage = _sizes(tensors), tensors[0].untyped_storage()
    places = [x.data_ptr() - storage.data_ptr() for x in tensors]
    is_buffer = storage.nbytes() == sum(sizes) and places == [0, *accumulate(sizes)][:-1] and tensors[0].is_pinned()
    return torch.empty(0, dtype=torch.uint8).set_(storage) if is_buffer else _packed(tensors)


def _packed(tensors: Tensors) -> torch.Tensor:
    """One buffer with all of `tensors`, pinned if there is an accelerator."""
    buffer = torch.empty(sum(_sizes(tensors)), dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    for view, tensor in zip(_views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def _views(buffer: torch.Tensor, tensors: Tensors) -> Tensors:
    """Views of a buffer with the dtypes and shapes of `tensors`."""
    parts = zip(buffer.split(_sizes(tensors)), tensors, strict=True)
    return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]
