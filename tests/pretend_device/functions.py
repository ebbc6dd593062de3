"""Functions of PyTorch that do not reach a backend: others stand in their places."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._pytree import tree_map_only

from .names import DEVICE, NAME
from .tensors import PretendTensor


def makes_pinned(function: Callable) -> Callable:
    """A factory function of PyTorch's whose page-locked memory is ours."""

    @functools.wraps(function)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    return make


def copies_to_device(function: Callable) -> Callable:
    """`torch.tensor` or `torch.as_tensor`, which on the device are a copy of what they are on the CPU."""

    @functools.wraps(function)
    def make(data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        modes = [mode.device for mode in _get_current_function_mode_stack() if isinstance(mode, _device.DeviceContext)]
        place = torch.device(device or [*modes, "cpu"][0])
        if isinstance(data, torch.Tensor) and DEVICE in (data.device, place):
            made = data.to(data.device if device is None else place, dtype)
            return made if function.__name__ == "as_tensor" else made.detach().clone()
        data = tree_map_only(PretendTensor, PretendTensor.tolist, data)
        if place.type != NAME:
            return function(data, dtype=dtype, device=device, **kwargs)
        made = function(data, dtype=dtype, device="cpu").to(place)
        return made.requires_grad_(kwargs.get("requires_grad", False))

    return make


def moves_parameters(function: Callable) -> Callable:
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
