"""What PyTorch asks of a device: its module, the guard of its C++ code, and autograd's engine."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.variable import ImperativeEngine
from torch.utils import backend_registration

from . import generator


class Backend(backend_registration._DummyBackendModule):
    """What PyTorch asks `torch.pretend`."""

    _initialized = True
    is_on = False

    def is_available(self) -> bool:
        return self.is_on

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> AbstractContextManager:
        return nullcontext()

    def manual_seed_all(self, seed: int) -> None:
        generator.seed_all(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(state)


BACKEND = Backend()
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
