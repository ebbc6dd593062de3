"""Attention over segments by flash attention kernels: those of packages, and the one that ships in PyTorch.

Shape legend and what each function computes: see [`~trl_paddingfree.core.model.attention`].
"""

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import pad
from transformers.integrations.flash_attention import get_target_dtype

from .. import upstream
from ..flat.batch import Inputs
from ..flat.layout import FlatLayout, Gather, GatherIndex, gathered
from .attention import boundaries, segment_attention

# The lowest CUDA compute capability that PyTorch's flash attention is compiled for: Ampere
_LEAST_CAPABILITY = (8, 0)


def _flat_values(query, key, value, dtype: torch.dtype | None, rows: GatherIndex | None = None):
    """Inputs of a varlen kernel: queries of all tokens, and keys and values gathered by `rows`."""
    query, key, value = gathered(query, None, dtype), *(gathered(x, rows, dtype) for x in (key, value))
    if value.size(-1) != query.size(-1):  # MLA: the kernels want values as wide as queries
        value = pad(value, [0, query.size(-1) - value.size(-1)])
    return query, key, value


def flash_attention(layout: FlatLayout, loaded_with: str, module, query, key, value, scaling=None, **kwargs):
    """transformers' own flash attention call, for flash-attn 2/3/4 and hub kernels, with our boundaries."""
    dtype = get_target_dtype(query, module)  # transformers casts float32 queries: PEFT keeps norms in float32
    q, k, v = (values[None] for values in _flat_values(query, key, value, dtype, layout.kv_gather))
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = kwargs["s_aux"].to(q.dtype)
    kwargs |= {**boundaries(layout), "is_causal": True, "softmax_scale": scaling, "attn_implementation": loaded_with}
    output = upstream.flash_attention_forward(q, k, v, attention_mask=None, query_length=q.size(1), **kwargs)
    return output[..., : value.size(-1)], None


@cache
def torch_varlen() -> Callable:
    """
    `torch.nn.attention.varlen.varlen_attn`, called with `(q, k, v, cu_q, cu_k, max_q, max_k, scale, window)`. Returns
    the output and the log-sum-exp of the scores.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # Releases that have this flag need it if there are fewer key heads than query heads; others need nothing
    parameters = inspect.signature(varlen_attn).parameters
    options: Inputs = {"return_aux": AuxRequest(lse=True), **dict.fromkeys({"enable_gqa"} & {*parameters}, True)}
    flags = torch.backends.cuda

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window):
        left, allows_cudnn = -1 if window is None else window - 1, flags.cudnn_sdp_enabled()
        flags.enable_cudnn_sdp(False)  # it would build and cache a plan for every batch shape
        try:
            lengths, window_size = (cu_q, cu_k, max_q, max_k), (left, 0)
            return varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, **options)
        finally:
            flags.enable_cudnn_sdp(allows_cudnn)

    return attend


@torch.library.custom_op("trl_paddingfree::flash_attn_on_paths", mutates_args=())
def _on_paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    index: torch.Tensor | None, order: torch.Tensor | None, offsets: torch.Tensor | None,
    cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, scale: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """
    [`torch_varlen`] with `(T, heads, D)` keys and values, gathered by the [`GatherIndex`] of these tensors, if given.
    The backward pass gathers them again, so only the originals are saved. TRL's selective checkpointing recognizes
    this operator by its name and saves its results.
    """
    keys, values = (x if index is None else x.index_select(0, index) for x in (key, value))
    return torch_varlen()(query, keys, values, cu_q, cu_k, max_q, max_k, scale, window)


def _keep(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    # All layers share these tensors, so they are kept out of the saved ones, which are offloaded and counted
    ctx.rows, ctx.options = None if inputs[3] is None else GatherIndex(*inputs[3:6]), inputs[6:]


def _gradients(ctx, grad: torch.Tensor, _) -> tuple[torch.Tensor | None, ...]:
    query, key, value, output, lse = ctx.saved_tensors
    if ctx.rows is not None:
        key, value = (x.index_select(0, ctx.rows.index) for x in (key, value))
    of_query, *gradients = upstream.varlen_gradients(grad, query, key, value, output, lse, *ctx.options)
    if ctx.rows is not None:
        gradients = [Gather.backward(ctx, x)[0] for x in gradients]
    return of_query, *gradients, *[None] * (3 + len(ctx.options))


_on_paths.register_autograd(_gradients, setup_context=_keep)


@cache
def why_no_varlen(device: torch.device) -> str:
    """Why a device cannot run PyTorch's varlen kernel; empty if it can. The one place that decides: tests patch it."""
    if device.type != "cuda":
        return f"the model is on {device.type}, the kernel needs CUDA"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _LEAST_CAPABILITY
    if capability >= _LEAST_CAPABILITY:
        return ""
    return f"the GPU has compute capability {'.'.join(map(str, capability))}, the kernel needs 8.0 (Ampere) or more"


def sdpa_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype in which SDPA would compute: autocast casts the inputs of SDPA, but not of the varlen kernel."""
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else query.dtype


def takes_varlen(query: torch.Tensor, kwargs: Inputs) -> bool:
    """Whether PyTorch's varlen kernel supports this call."""
    return (
        not why_no_varlen(query.device)
        and sdpa_dtype(query) in (torch.float16, torch.bfloat16)
        and query.size(-1) in range(8, 257, 8)
        and all(kwargs.get(name) is None for name in ("softcap", "s_aux", "position_bias"))
        and not kwargs.get("dropout")
    )


def varlen_attention(layout: FlatLayout, loaded_with: str, module, query, key, value, **kwargs):
    """The flash attention kernel that ships in PyTorch. Unsupported calls go to [`segment_attention`]."""
    if not takes_varlen(query, kwargs) or layout.blocks is not None:  # the kernel is causal, image blocks are not
        return segment_attention(layout, loaded_with, module, query, key, value, **kwargs)
    rows, values = layout.kv_gather, _flat_values(query, key, value, sdpa_dtype(query))
    copied = (None,) * 3 if rows is None else (rows.index, rows.order, rows.offsets)
    *lengths, _ = boundaries(layout).values()
    output, _ = _on_paths(*values, *copied, *lengths, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return output[None, ..., : value.size(-1)], None
