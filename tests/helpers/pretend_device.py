"""
A second device in pure Python, which shows on a CPU what otherwise only a GPU would show.

A tensor on `DEVICE` holds a CPU tensor and is computed there, so that every value is the CPU's, to rounding. What
differs is what differs on CUDA:

- Tensors of two devices do not mix, but for numbers (tensors without a dimension) on the CPU. A tensor of the device
  may be indexed by one on the CPU, and not the other way round. No tensor of the device has a `.numpy()`.
- What makes the host wait is counted, with the line that asked: whatever reads a value, copies from the device that are
  not non-blocking into pinned memory, and copies to it that are not non-blocking out of pinned memory.
- A non-blocking copy from the device arrives when the host next waits, and holds ones before that.
- The device has as much memory as [`memory`] says, and counts what live tensors take.
- Autocast has the rules of CUDA, and the backward pass runs on another thread.
- Random numbers come from a generator of the device within [`own_generator`], and else from the CPU's.

`install` turns it on, before models are loaded; `switched_off` has trainers choose the CPU for a while. Operators that
no CPU computes need a stand-in, see [`computes`]. Left out are quantized weights, loss scaling and compiled code.

It is a tensor subclass that wraps, and PyTorch's python backend for the key PrivateUse1.
"""

import ctypes
import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch.autograd.variable import ImperativeEngine, Variable
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, backend_registration

NAME = "pretend"
DEVICE = torch.device("cpu")  # until it is installed: PyTorch knows the name from then on
FOLDERS = (Path(__file__).parents[2], Path(torch.__file__).parents[1])  # of the repository, and of installed packages
aten = torch.ops.aten

# --- waiting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """
    Why the host waits for the device, and where.

    Args:
        reason (`str`):
            The operator, `"copy to the device"` or `"copy to the host"`.
        file (`str`):
            Path in the repository or among the installed packages, of the innermost line that is not PyTorch's.
        function (`str`):
            Name of the function around that line, with those of its classes.
        line (`int`):
            Its number.
    """

    reason: str
    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function}): {self.reason}"


WAITS: Counter[Wait] = Counter()
# Non-blocking copies from the device that have not arrived: where to, and what
_on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []
_arrived = 0  # how many have


@contextmanager
def counted_waits() -> Iterator[Counter[Wait]]:
    """A counter that holds, once the context is left, what made the host wait in it."""
    before, counted = WAITS.copy(), Counter()
    yield counted
    counted.update(WAITS - before)


def _wait(reason: str) -> None:
    """Count that the host waits; all that is on its way arrives."""
    WAITS[_here(reason)] += 1
    arrive()


def arrive() -> None:
    """All copies from the device have arrived."""
    global _arrived
    for target, value in _on_their_way:
        target.copy_(value)
    _arrived += len(_on_their_way)
    _on_their_way.clear()


def _here(reason: str) -> Wait:
    frame: Any = sys._getframe(2)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    names = [str(path.relative_to(folder)) for folder in FOLDERS if path.is_relative_to(folder)]
    return Wait(reason, names[0] if names else str(path), frame.f_code.co_qualname, frame.f_lineno)


class Event:
    """In the place of `torch.Event`: it has happened once the copies from the device before it have arrived."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.after = 0

    def record(self, stream: Any = None) -> None:
        self.after = _arrived + len(_on_their_way)

    def query(self) -> bool:
        return _arrived >= self.after

    def synchronize(self) -> None:
        if not self.query():
            _wait("event")

    def wait(self, stream: Any = None) -> None:
        """Only streams wait, not the host."""


class Stream:
    """The one queue of work of the device."""

    device_index, stream_id = 0, 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        _wait("stream")

    def wait_event(self, event: Event) -> None:
        """One queue needs no order."""

    wait_stream = wait_event

    def is_capturing(self) -> bool:
        return False


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """
    The device's memory, in bytes.

    Args:
        total (`int`):
            How much there is. An allocation beyond it fails.
        allocated (`int`):
            What live tensors take.
        peak (`int`):
            The most that they took, since it was reset.
    """

    total: int = 16 * 2**30
    allocated: int = 0
    peak: int = 0
    held: dict[int, tuple[weakref.ref, int]] = field(default_factory=dict)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor for as long as it lives. Raises `torch.OutOfMemoryError` if it is too large."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        reference, before = self.held.get(key, (None, 0))
        if size == before:
            return
        if self.allocated + size - before > self.total:
            raise torch.OutOfMemoryError(
                f"{NAME}: out of memory. Tried to allocate {size} bytes, {self.total - self.allocated} are free."
            )
        self.held[key] = reference or weakref.ref(storage, lambda _: self._release(key)), size
        self.allocated += size - before
        self.peak = max(self.peak, self.allocated)

    def _release(self, key: int) -> None:
        self.allocated -= self.held.pop(key)[1]

    def reset_peak(self, *_: Any) -> None:
        self.peak = self.allocated


memory = Memory()
_pinned: dict[int, weakref.ref] = {}  # page-locked storages of the host


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


def _pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    storage = copy.untyped_storage()
    key = storage._cdata
    _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return copy


# --- tensors ----------------------------------------------------------------------------------------------------------


class PretendTensor(torch.Tensor):
    """A tensor on the device; `raw` is the CPU tensor inside."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor):
        memory.hold(raw)
        return _wrapper(cls, raw)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, *args, **(kwargs or {}))

    def as_subclass(self, cls):
        return self if isinstance(self, cls) else _wrapper(_subclass(cls), self.raw)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        if not isinstance(value, PretendTensor):
            raise RuntimeError(f"{NAME}: `data` of a tensor of the device cannot be on {value.device}")
        self._become(value.raw)

    def _become(self, raw: torch.Tensor) -> None:
        """Be a tensor of another shape, over another storage."""
        memory.hold(raw)
        torch.Tensor.data.__set__(self, _wrapper(PretendTensor, raw))  # type: ignore[attr-defined]
        self.raw = raw

    def untyped_storage(self):
        return self.raw.untyped_storage()

    def data_ptr(self):
        return self.raw.data_ptr()

    def tolist(self):
        _wait("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False):
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        made = torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)
        return made.requires_grad_(requires_grad)

    def __getitem__(self, index):
        return super().__getitem__(_on_device(index))

    def __setitem__(self, index, value):
        # Where CUDA's number would be: filling by a mask then waits for nothing
        value = value if torch.is_tensor(value) else torch.tensor(value, dtype=self.dtype)
        super().__setitem__(_on_device(index), value)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        copied: torch.Tensor = PretendTensor(self.raw.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol):
        arguments = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments

    def __repr__(self, *, tensor_contents=None):
        return f"{NAME}({self.raw!r})"


def _on_device(index: Any) -> Any:
    """An index with its lists and arrays on the device, as CUDA makes them."""
    if isinstance(index, tuple):
        return tuple(map(_on_device, index))
    return torch.tensor(index, device=DEVICE) if isinstance(index, (list, np.ndarray)) else index


class _Converts(torch.Tensor):
    """Between a subclass of the user's and ours: results are of the former, as PyTorch's default makes them."""

    user_class: type

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls.user_class) if type(result) is PretendTensor else result


@functools.cache
def _subclass(cls: type) -> type:
    return type(f"{cls.__name__}On{NAME.title()}", (cls, _Converts, PretendTensor), {"user_class": cls})


def _wrapper(cls: type, raw: torch.Tensor) -> Any:
    made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        raw.size(),
        strides=raw.stride(),
        storage_offset=raw.storage_offset(),
        dtype=raw.dtype,
        layout=raw.layout,
        device=DEVICE,
    )
    made.raw = raw
    return made


# --- operators --------------------------------------------------------------------------------------------------------

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
_stand_ins: dict[Any, Callable] = {}


def computes(op: Any) -> Callable[[Callable], Callable]:
    """
    A decorator: has a function of CPU tensors compute an operator that has no CPU kernel, or another one than CUDA's.

    Examples:
    ```python
    @computes(torch.ops.torch_attn._varlen_attn.default)
    def varlen_attention(query, key, value, cu_seq_q, cu_seq_k, *args, **kwargs): ...
    ```
    """
    return lambda function: _stand_ins.setdefault(op, function)


@computes(aten.histc.default)
def _histogram(values: torch.Tensor, *args: Any) -> torch.Tensor:
    """Integers are counted by CUDA, and not by the CPU."""
    return aten.histc(values.float(), *args).to(values.dtype)


@computes(aten._pin_memory.default)
def _refuse_to_pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be pinned")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(function: Callable, value: Any) -> Any:
    """A value with the function of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, each) for each in value)
    return value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, PretendTensor) else tensor


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator of whose tensors some are on the device, or whose result shall be there."""
    if op is aten.copy_.default:
        return _copy(*args, **kwargs)
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if op is aten._to_copy.default and to_host:
        return _to_host(*args, **kwargs)
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    if op in _INDEXED:
        _index(op, *args)
        tensors = [*_tensors(args[:1]), *_tensors(args[2:])]
    for tensor in tensors:
        if not isinstance(tensor, PretendTensor) and (tensor.ndim or op in _STRICT):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and "
                f"{tensor.device}! (in {op})"
            )
    if op in _READS and not (op is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None):
        _wait(str(op.overloadpacket.__name__).removeprefix("_"))
    pinned = kwargs.pop("pin_memory", False)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    known = {id(x.raw): x for x in tensors if isinstance(x, PretendTensor)}
    with _drawing() if torch.Tag.nondeterministic_seeded in op.tags else nullcontext():
        result = _stand_ins.get(op, op)(*_mapped(_raw, args), **{name: _mapped(_raw, x) for name, x in kwargs.items()})
    if to_host:
        return _pin(result) if pinned else result

    def wrapped(raw: torch.Tensor) -> torch.Tensor:
        tensor = known.get(id(raw))
        if tensor is None:
            return PretendTensor(raw)
        if (tensor.size(), tensor.stride()) != (raw.size(), raw.stride()):
            tensor._become(raw)
        return tensor

    return _mapped(wrapped, result)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)`, of which one is on the device, or both."""
    if not isinstance(source, PretendTensor) and not (non_blocking and _is_pinned(source)):
        _wait("copy to the device")
    elif not isinstance(target, PretendTensor):
        _leave(target, source.raw, non_blocking and _is_pinned(target))
        return target
    _raw(target).copy_(_raw(source))
    return target


def _to_host(source: PretendTensor, *, non_blocking: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
    """`source.to("cpu")`: into pinned memory if it may be non-blocking, as CUDA does it."""
    copy = aten._to_copy.default(source.raw, device=torch.device("cpu"), **{**options, "pin_memory": None})
    target = _pin(copy) if non_blocking else copy
    _leave(target, source.raw, non_blocking)
    return target


def _leave(target: torch.Tensor, value: torch.Tensor, without_waiting: bool) -> None:
    """Have a value leave the device: it arrives at once, or when the host next waits."""
    if without_waiting:
        _on_their_way.append((target, value.clone()))
        target.fill_(1)
    else:
        _wait("copy to the host")
        target.copy_(value)


def _index(op: Any, tensor: torch.Tensor, indices: Any, value: torch.Tensor | None = None, *_: Any) -> None:
    """Refuse or count what reading or writing by indices takes."""
    found = list(_tensors(indices))
    if not isinstance(tensor, PretendTensor):
        raise RuntimeError(
            f"indices should be either on {tensor.device} or on the same device as the indexed tensor ({tensor.device})"
        )
    for index in found:
        if not isinstance(index, PretendTensor):
            _wait("copy to the device")
    is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in found if isinstance(index, PretendTensor))
    fills = value is not None and value.numel() == 1 and not isinstance(value, PretendTensor)
    if is_mask and not (fills and len(found) == 1):
        _wait("index by a mask")


# --- random numbers ---------------------------------------------------------------------------------------------------

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
def _drawing() -> Iterator[None]:
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


# --- autocast ---------------------------------------------------------------------------------------------------------

# What CUDA computes in the lower precision, and in the widest of its arguments; all else that it casts, in float32
_LOWER = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear",
    "linalg_vecdot", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention",
}  # fmt: skip
_WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
}  # fmt: skip


def _autocast(op: Any, name: str) -> Callable:
    """The operator under autocast, with arguments cast as CUDA casts them."""

    def eligible(tensor: torch.Tensor) -> bool:
        return tensor.device == DEVICE and tensor.is_floating_point() and tensor.dtype != torch.float64

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype(NAME)
        is_lower = name in _WIDEST and all(x.dtype == lower for x in _tensors(args) if eligible(x))
        dtype = lower if is_lower or name in _LOWER else torch.float32

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if eligible(tensor) else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*_mapped(cast, args), **{name: _mapped(cast, value) for name, value in kwargs.items()})

    return kernel


def _register_autocast(library: torch.library.Library) -> None:
    for registered in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        name, overload = (*registered.removeprefix("aten::").split("."), "default")[:2]
        if packet := getattr(aten, name, None):
            library.impl(getattr(packet, overload), _autocast(getattr(packet, overload), name), "AutocastPrivateUse1")


# --- the device -------------------------------------------------------------------------------------------------------

_is_on = False
# The oldest PyTorch that it was tried with
LOWEST = "2.13"


def why_off() -> str:
    """Why the device is off, empty if it is on."""
    if Version(torch.__version__) < Version(LOWEST):
        return f"the pretend device needs PyTorch {LOWEST}, this is {torch.__version__}"
    return "" if _is_on else f"the pretend device is off: set TRL_PADDINGFREE_DEVICE={NAME}"


class _Module(backend_registration._DummyBackendModule):
    """What PyTorch asks `torch.pretend`."""

    _initialized = True

    def is_available(self) -> bool:
        return _is_on

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> AbstractContextManager:
        return nullcontext()

    def manual_seed_all(self, seed: int) -> None:
        global _generator
        if _generator is not None:
            _generator = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state() if _generator is None else _generator.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        global _generator
        if _generator is None:
            torch.set_rng_state(state)
        else:
            _generator = state.clone()


_lost: list[BaseException] = []  # errors that C++ was on its way to hand to Python


class _Guard(torch._C._acc.DeviceGuard):
    """
    What C++ asks of the current device.

    It asks while an error of a hook is set, too, in functions that must not raise: a call in Python with an error set
    would end the process. So the error is taken away first, and [`_Engine`] raises it.
    """

    taken = [ctypes.py_object() for _ in range(3)]  # its type, itself and its traceback
    # Made beforehand: with an error set, no function but that which takes it away may be called
    places = tuple(ctypes.byref(each) for each in taken)

    def type_(self, _fetch=ctypes.pythonapi.PyErr_Fetch, _places=places, _kept=taken, _lost=_lost):
        _fetch(*_places)
        if _kept[0]:
            kind, error = _kept[0].value, _kept[1].value if _kept[1] else None
            _lost.append(error if isinstance(error, BaseException) else kind(error))
            for reference in _kept:
                if reference:
                    ctypes.pythonapi.Py_DecRef(reference)
        return torch._C._autograd.DeviceType.PrivateUse1


class _Engine(ImperativeEngine):
    """Autograd's engine, which raises what a guard had to take away."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _lost.clear()
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError as error:
            raise _lost.pop() if _lost else error from None


def _makes_pinned(function: Callable) -> Callable:
    """A factory function of PyTorch's whose page-locked memory is ours."""

    @functools.wraps(function)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    return make


def _read(data: Any) -> Any:
    """Nested lists with the values of the device's tensors."""
    if isinstance(data, PretendTensor):
        return data.tolist()
    return [_read(each) for each in data] if isinstance(data, (list, tuple)) else data


def _copies_to_device(function: Callable) -> Callable:
    """`torch.tensor` or `torch.as_tensor`, which on the device are a copy of what they are on the CPU."""

    @functools.wraps(function)
    def make(data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        modes = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, _device.DeviceContext)]
        place = torch.device(device or [*modes, "cpu"][0])
        if isinstance(data, torch.Tensor) and DEVICE in (data.device, place):
            made = data.to(data.device if device is None else place, dtype)
            return made if function.__name__ == "as_tensor" else made.detach().clone()
        if place.type != NAME:
            return function(_read(data), dtype=dtype, device=device, **kwargs)
        made = function(_read(data), dtype=dtype, device="cpu").to(place)
        return made.requires_grad_(kwargs.get("requires_grad", False))

    return make


def _moves_parameters(function: Callable) -> Callable:
    """`Module.to`, which keeps parameters where it moves their values: optimizers and tied layers hold them."""

    @functools.wraps(function)
    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        moved = device is not None and any(x.device.type != device.type for x in module.parameters())
        torch.__future__.set_swap_module_params_on_conversion(moved)
        try:
            return function(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return to


@functools.cache
def install() -> None:
    """Turn the device on in this process, before a model is loaded: trainers with `use_cpu=True` choose it."""
    if Version(torch.__version__) < Version(LOWEST):
        return
    global DEVICE, _is_on
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), device_guard=_Guard())
    DEVICE, _is_on = torch.device(NAME, 0), True
    libraries = torch.library.Library("_", "IMPL", "PrivateUse1"), torch.library.Library("aten", "IMPL")
    libraries[0].fallback(_run)
    libraries[1].impl("is_pinned", _is_pinned, "CPU")
    libraries[1].impl("_pin_memory", _pin, "CPU")
    libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _register_autocast(libraries[1])
    install.libraries = libraries  # type: ignore[attr-defined]  # they end with their last reference
    _device._device_constructors()  # `with torch.device(...)` knows functions by identity: before they are replaced
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _copies_to_device(getattr(torch, name)))
    for name in ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, _makes_pinned(getattr(torch, name)))
    answers: dict[str, Callable] = {
        "memory_allocated": lambda *_: memory.allocated,
        "max_memory_allocated": lambda *_: memory.peak,
        "memory_reserved": lambda *_: memory.allocated,
        "max_memory_reserved": lambda *_: memory.peak,
        "reset_peak_memory_stats": memory.reset_peak,
        "get_memory_info": lambda *_: (memory.total - memory.allocated, memory.total),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: _wait("synchronize"),
        "current_stream": lambda *_: Stream(),
    }
    for name, answer in answers.items():
        setattr(torch.accelerator, name, answer)
    Variable._execution_engine = _Engine()
    # Storages have no place on it: tensors that are saved from it come back to it by themselves
    torch.serialization.register_package(5, lambda obj: None, lambda obj, place: obj if NAME in place else None)
    torch.Event = Event  # type: ignore[misc, assignment]
    torch.nn.Module.to = _moves_parameters(torch.nn.Module.to)  # type: ignore[method-assign]
    torch.nn.Module.cpu = lambda module: module.to("cpu")  # type: ignore[method-assign]
    _have_trainers_choose_it()


def _have_trainers_choose_it() -> None:
    import transformers

    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)  # what accelerate's states take
    places = transformers.modeling_utils._get_device_map

    def device_map(model: Any, asked: Any, *args: Any) -> Any:
        """TRL asks for `"auto"`."""
        return {"": DEVICE} if _is_on and isinstance(asked, str) else places(model, asked, *args)

    transformers.modeling_utils._get_device_map = device_map
    transformers.training_args.is_torch_bf16_gpu_available = lambda: _is_on

    def device(arguments: Any) -> torch.device:
        chosen = arguments._setup_devices
        return DEVICE if _is_on and chosen.type == "cpu" else chosen

    transformers.TrainingArguments.device = property(device)


@contextmanager
def switched_off() -> Iterator[None]:
    """Within this context, trainers that are made choose the CPU."""
    global _is_on
    _is_on = False
    os.environ.pop("ACCELERATE_TORCH_DEVICE")
    try:
        yield
    finally:
        _is_on = True
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
