"""Attention over segments: one signature, several kernels, and the masks and boundaries that these take.

Shape legend: see [`~trl_paddingfree.core.flat.segments`]; in addition
    B = 1, H = query heads, K = key/value heads, D = head size
Every function computes, for each segment, causal attention of the segment's queries over the keys on its path, aligned
to the bottom right: the last query sees the last key.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import mul
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.flash_attention import get_target_dtype

from .. import upstream
from ..flat.batch import Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import Attention, FlatLayout, Gather, GatherIndex, gathered, once_per_layout

# How attention is computed over flat batches
BackendName = Literal["flash", "varlen", "segment", "positions", "mask"]
# Fastest first
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# Those that replace the model's attention function; the others keep it, and pass it positions or a dense mask
ATTENTION_BACKENDS: tuple[BackendName, ...] = ("flash", "varlen", "segment")
# transformers' own arguments for the boundaries of a flat batch; our attention reads the layout instead
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# The lowest CUDA compute capability that PyTorch's flash attention is compiled for: Ampere
_LEAST_CAPABILITY = (8, 0)


def boundaries(layout: FlatLayout) -> Inputs:
    """The boundaries of a flat batch, as [`~transformers.modeling_flash_attention_utils.FlashAttentionKwargs`]."""
    lengths = (layout.segments.max_seqlen_q, layout.segments.max_seqlen_k)
    return dict(zip(BOUNDARIES, (layout.cu_seqlens_q, layout.cu_seqlens_k, *lengths, layout.seq_idx), strict=True))


@once_per_layout
def masks_of_calls(
    layout: FlatLayout, window: int | None, dtype: torch.dtype | None, pads: bool = True
) -> list[torch.Tensor | None]:
    """
    The mask of each of the [`~trl_paddingfree.core.flat.calls.AttentionCalls`] of a layout, made once per batch and
    shared by all layers: see [`_segment_mask`]. `None` where plain causal attention is equivalent.
    """
    masks = []
    for segments in AttentionCalls.of(layout, pads).segments:
        shapes = tuple((layout.segments.starts[i], layout.segments.lengths[i]) for i in segments)
        shapes = shapes[:1] if len(set(shapes)) == 1 else shapes
        seen = window if window is not None and window < max(map(sum, shapes)) else None
        is_causal = not any(start for start, _ in shapes) and seen is None and dtype is None and layout.blocks is None
        segment = None if layout.blocks is None else segments[0]  # without blocks, only shapes matter
        masks.append(None if is_causal else _shared_mask(layout, shapes, seen, dtype, segment))
    return masks


def _segment_mask(
    layout: FlatLayout,
    shapes: Sequence[tuple[int, int]],
    window: int | None,
    dtype: torch.dtype | None,
    segment: int | None = None,
) -> torch.Tensor:
    """
    `(n, 1, Q, L)` mask of segments with `n` shapes `(keys before the queries, queries)`: additive in `dtype`; boolean
    if it is `None`.

    Tokens see earlier ones and those of their image block, as far back as a `window` of positions, their own included.
    With blocks, each `segment` needs its own mask. Padding sees what the last token of its segment sees, so that no row
    is fully masked. `Q` and `L` are the most queries and keys of any segment. If all have one shape, `n` is 1.
    """
    queries, keys = max(length for _, length in shapes), max(map(sum, shapes))
    start, length = layout.tensor(np.array(shapes).T[..., None, None])
    q = start + torch.minimum(torch.arange(queries, device=layout.device)[:, None], length - 1)
    k = torch.arange(keys, device=layout.device)
    mask = k <= q
    if segment is not None and layout.blocks is not None:
        blocks = layout.blocks[layout.tensor(layout.segments.path(segment))]
        own = blocks[shapes[0][0] :, None]
        mask = mask | ((own == blocks) & (own >= 0))
    if window is not None:
        mask = mask & (k > q - window)
    if dtype is not None:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask[:, None]


_shared_mask = once_per_layout(_segment_mask)


@once_per_layout
def dense_mask(layout: FlatLayout, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`(1, 1, T, T)` additive mask of the whole flat row; see [`_segment_mask`]."""
    total = layout.segments.num_tokens
    mask = torch.full((total, total), torch.finfo(dtype).min, dtype=dtype, device=layout.device)
    for i, queries in enumerate(mask.split(layout.segments.lengths)):
        shape = (layout.segments.starts[i], layout.segments.lengths[i])
        queries[:, layout.tensor(layout.segments.path(i))] = _segment_mask(layout, [shape], window, dtype, i)
    return mask[None, None]


def causal_mask(layout: FlatLayout, rows: int, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """
    `(rows, 1, length, length)` additive mask of ordinary rows, made once per batch. It is expanded to all `rows`,
    because DeepSeek V4 concatenates it with a mask of compressed keys that differs from row to row.
    """
    return _shared_mask(layout, ((0, length),), window, dtype).expand(rows, 1, length, length)


def _flat_values(query, key, value, dtype: torch.dtype | None, rows: GatherIndex | None = None):
    """Inputs of a varlen kernel: queries of all tokens, and keys and values gathered by `rows`."""
    query, key, value = gathered(query, None, dtype), *(gathered(x, rows, dtype) for x in (key, value))
    if value.size(-1) != query.size(-1):  # MLA: the kernels want values as wide as queries
        value = pad(value, [0, query.size(-1) - value.size(-1)])
    return query, key, value


def segment_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The model's own attention, by groups of like segments ([`AttentionCalls`]): exact on every device and dtype."""
    # Eager functions have no public name
    attend = upstream.attention_function(previous, module) if previous == "eager" else AttentionInterface()[previous]
    # Functions of the user's own, even under transformers' names, may place queries by the number of keys
    pads = getattr(attend, "__globals__", {}).get("__name__", "").startswith("transformers.")
    calls = AttentionCalls.of(layout, pads)
    # Eager functions add their mask to the scores
    dtype = query.dtype if previous == "eager" else None
    masks = masks_of_calls(layout, kwargs.pop("sliding_window", None), dtype, pads)
    outputs = []
    query, key, value = gathered(query, calls.query_rows), *(gathered(x, calls.key_rows) for x in (key, value))
    numbers = list(map(len, calls.segments))
    lengths, key_lengths = (list(map(mul, numbers, longest)) for longest in (calls.queries, calls.keys))
    # The backward pass of `split` is one concatenation; each slice would get a gradient as long as the flat axis
    inputs = query.split(lengths), key.split(key_lengths), value.split(key_lengths)
    for mask, number, *parts in zip(masks, numbers, *inputs, strict=True):
        q, k, v = (x.unflatten(0, (number, -1)).transpose(1, 2) for x in parts)
        if previous == "eager":  # `matmul` copies several segments, and a view would keep all queries too
            q = q.contiguous()
        outputs.append(attend(module, q, k, v, mask, **kwargs)[0].flatten(0, 1))
    output = torch.cat(outputs)
    return (output if calls.answers is None else Gather.apply(output, calls.answers))[None], None


def flash_attention(layout: FlatLayout, previous: str, module, query, key, value, scaling=None, **kwargs):
    """transformers' own flash attention call, for flash-attn 2/3/4 and hub kernels, with our boundaries."""
    dtype = get_target_dtype(query, module)  # transformers casts float32 queries: PEFT keeps norms in float32
    q, k, v = (values[None] for values in _flat_values(query, key, value, dtype, layout.kv_gather))
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = kwargs["s_aux"].to(q.dtype)
    kwargs |= {**boundaries(layout), "is_causal": True, "softmax_scale": scaling, "attn_implementation": previous}
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


def varlen_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The flash attention kernel that ships in PyTorch. Unsupported calls go to [`segment_attention`]."""
    if not takes_varlen(query, kwargs) or layout.blocks is not None:  # the kernel is causal, image blocks are not
        return segment_attention(layout, previous, module, query, key, value, **kwargs)
    rows, values = layout.kv_gather, _flat_values(query, key, value, sdpa_dtype(query))
    copied = (None,) * 3 if rows is None else (rows.index, rows.order, rows.offsets)
    *lengths, _ = boundaries(layout).values()
    output, _ = _on_paths(*values, *copied, *lengths, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return output[None, ..., : value.size(-1)], None


ATTENTION: dict[BackendName, Attention] = {
    "flash": flash_attention,
    "varlen": varlen_attention,
    "segment": segment_attention,
}
