"""A tensor subclass that wraps: what is on the device holds a CPU tensor."""

import functools
from typing import Any

import numpy as np
import torch

from .memory import memory
from .names import DEVICE, NAME
from .waits import wait


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
        from .operators import run  # which makes such tensors

        return run(op, *args, **(kwargs or {}))

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
        wait("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False):
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args, **kwargs):
        return self.numpy()

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
