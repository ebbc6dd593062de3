"""Autocast has the rules of CUDA."""

from collections.abc import Callable
from typing import Any

import torch

from .names import DEVICE, NAME
from .operators import aten, mapped, tensors_of

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
        is_lower = name in _WIDEST and all(x.dtype == lower for x in tensors_of(args) if eligible(x))
        dtype = lower if is_lower or name in _LOWER else torch.float32

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if eligible(tensor) else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*mapped(cast, args), **{name: mapped(cast, value) for name, value in kwargs.items()})

    return kernel


def register_autocast(library: torch.library.Library) -> None:
    for registered in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        name, overload = (*registered.removeprefix("aten::").split("."), "default")[:2]
        if packet := getattr(aten, name, None):
            library.impl(getattr(packet, overload), _autocast(getattr(packet, overload), name), "AutocastPrivateUse1")
