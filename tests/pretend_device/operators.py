"""Operators are computed on the CPU, and refuse and wait as those of CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .backend import drawing
from .memory import is_pinned, pin
from .names import DEVICE
from .tensors import PretendTensor
from .waits import leave, wait

aten = torch.ops.aten

_READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.allclose.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
_INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# Those that take not even a number from the CPU
_STRICT = {aten.cat.default, aten.stack.default}


def _histogram(values: torch.Tensor, *args: Any) -> torch.Tensor:
    """Integers are counted by CUDA, and not by the CPU."""
    return aten.histc(values.float(), *args).to(values.dtype)


def _refuse_to_pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be pinned")


# For operators that have no CPU kernel, or another one than CUDA's
_STAND_INS: dict[Any, Callable] = {aten.histc.default: _histogram, aten._pin_memory.default: _refuse_to_pin}


_lacks = set[torch.dtype]()


@contextmanager
def without(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, the device has no tensors of a `dtype`, as MPS has none in float64."""
    _lacks.add(dtype)
    try:
        yield
    finally:
        _lacks.discard(dtype)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def mapped(function: Callable, value: Any) -> Any:
    """A value with the function of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, each) for each in value)
    return value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, PretendTensor) else tensor


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator of whose tensors some are on the device, or whose result shall be there."""
    if op is aten.copy_.default:
        return _copy(*args, **kwargs)
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if op is aten._to_copy.default and to_host:
        return _to_host(*args, **kwargs)
    tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
    if op in _INDEXED:
        _index(op, *args)
        tensors = [*tensors_of(args[:1]), *tensors_of(args[2:])]
    for tensor in tensors:
        if not isinstance(tensor, PretendTensor) and (tensor.ndim or op in _STRICT):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{tensor.device}! (in {op})"
            )
    if op in _READS and not (op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None):
        wait(str(op.overloadpacket.__name__).removeprefix("_"))
    pinned = kwargs.pop("pin_memory", False)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    known = {id(x.raw): x for x in tensors if isinstance(x, PretendTensor)}
    with drawing() if torch.Tag.nondeterministic_seeded in op.tags else nullcontext():
        result = _STAND_INS.get(op, op)(*mapped(_raw, args), **{name: mapped(_raw, x) for name, x in kwargs.items()})
    if to_host:
        return pin(result) if pinned else result

    def wrapped(raw: torch.Tensor) -> torch.Tensor:
        if raw.dtype in _lacks:
            raise TypeError(f"Cannot convert a tensor to {raw.dtype}: the device has none (in {op})")
        tensor = known.get(id(raw))
        if tensor is None:
            return PretendTensor(raw)
        if (tensor.size(), tensor.stride()) != (raw.size(), raw.stride()):
            tensor._become(raw)
        return tensor

    return mapped(wrapped, result)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)`, of which one is on the device, or both."""
    if not isinstance(source, PretendTensor) and not (non_blocking and is_pinned(source)):
        wait("copy to the device")
    elif not isinstance(target, PretendTensor):
        leave(target, source.raw, non_blocking and is_pinned(target))
        return target
    _raw(target).copy_(_raw(source))
    return target


def _to_host(source: PretendTensor, *, non_blocking: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
    """`source.to("cpu")`: into pinned memory if it may be non-blocking, as CUDA does it."""
    copy = aten._to_copy.default(source.raw, device=torch.device("cpu"), **{**options, "pin_memory": None})
    target = pin(copy) if non_blocking else copy
    leave(target, source.raw, non_blocking)
    return target


def _index(op: Any, tensor: torch.Tensor, indices: Any, value: torch.Tensor | None = None, *_: Any) -> None:
    """Refuse or count what reading or writing by indices takes."""
    found = list(tensors_of(indices))
    if not isinstance(tensor, PretendTensor):
        raise RuntimeError(
            f"indices should be either on {tensor.device} or on the same device as the indexed tensor ({tensor.device})"
        )
    for index in found:
        if not isinstance(index, PretendTensor):
            wait("copy to the device")
    is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in found if isinstance(index, PretendTensor))
    fills = value is not None and value.numel() == 1 and not isinstance(value, PretendTensor)
    if is_mask and not (fills and len(found) == 1):
        wait("index by a mask")
