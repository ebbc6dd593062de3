"""What PyTorch asks of a device: its module, with a generator, the guard of its C++ code, and autograd's engine."""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.variable import ImperativeEngine
from torch.utils import backend_registration


class Backend(backend_registration._DummyBackendModule):
    """What PyTorch asks `torch.pretend`."""

    _initialized = True
    is_on = False
    own_state: torch.Tensor | None = None  # of the device's own generator, if it has one

    def is_available(self) -> bool:
        return self.is_on

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> AbstractContextManager:
        return nullcontext()

    def manual_seed_all(self, seed: int) -> None:
        if self.own_state is not None:
            self.own_state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state() if self.own_state is None else self.own_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        if self.own_state is None:
            torch.set_rng_state(state)
        else:
            self.own_state = state.clone()


BACKEND = Backend()


@contextmanager
def own_generator() -> Iterator[None]:
    """Within this context, the device has a generator of its own, as CUDA does, and values are not the CPU's."""
    BACKEND.own_state = torch.get_rng_state()
    try:
        yield
    finally:
        BACKEND.own_state = None


@contextmanager
def drawing() -> Iterator[None]:
    """Within this context, the CPU draws from the device's own generator, if it has one."""
    if BACKEND.own_state is None:
        yield
        return
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(BACKEND.own_state)
        yield
        BACKEND.own_state = torch.get_rng_state()


_lost: list[BaseException] = []  # errors that C++ was on its way to hand to Python


class Guard(torch._C._acc.DeviceGuard):
    """
    What C++ asks of the current device.

    It asks while an error of a hook is set, too, in functions that must not raise: a call in Python with an error set
    would end the process. So the error is taken away first, and [`Engine`] raises it.
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


class Engine(ImperativeEngine):
    """Autograd's engine, which raises what a guard had to take away."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _lost.clear()
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError as error:
            raise _lost.pop() if _lost else error from None
