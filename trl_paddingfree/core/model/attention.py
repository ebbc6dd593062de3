"""Attention over segments, by any attention function of a model; and the masks and boundaries that others take.

Shape legend: see [`~trl_paddingfree.core.flat.segments`]; in addition
    B = 1, H = query heads, K = key/value heads, D = head size
Every function computes, for each segment, causal attention of the segment's queries over the keys on its path, aligned
to the bottom right: the last query sees the last key.
"""

from collections.abc import Sequence
from operator import mul

import numpy as np
import torch
from transformers import AttentionInterface

from .. import upstream
from ..flat.batch import Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import FlatLayout, Gather, gathered, once_per_layout

# transformers' own arguments for the boundaries of a flat batch; our attention reads the layout instead
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


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
    shared by all layers: see [`segment_mask`]. `None` where plain causal attention is equivalent.
    """
    masks = []
    for segments in AttentionCalls.of(layout, pads).segments:
        shapes = tuple((layout.segments.starts[i], layout.segments.lengths[i]) for i in segments)
        shapes = shapes[:1] if len(set(shapes)) == 1 else shapes
        seen = window if window is not None and window < max(map(sum, shapes)) else None
        is_causal = not any(start for start, _ in shapes) and seen is None and dtype is None and layout.blocks is None
        segment = None if layout.blocks is None else segments[0]  # without blocks, only shapes matter
        masks.append(None if is_causal else shared_mask(layout, shapes, seen, dtype, segment))
    return masks


def segment_mask(
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


shared_mask = once_per_layout(segment_mask)


@once_per_layout
def dense_mask(layout: FlatLayout, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`(1, 1, T, T)` additive mask of the whole flat row; see [`segment_mask`]."""
    total = layout.segments.num_tokens
    mask = torch.full((total, total), torch.finfo(dtype).min, dtype=dtype, device=layout.device)
    for i, queries in enumerate(mask.split(layout.segments.lengths)):
        shape = (layout.segments.starts[i], layout.segments.lengths[i])
        queries[:, layout.tensor(layout.segments.path(i))] = segment_mask(layout, [shape], window, dtype, i)
    return mask[None, None]


def segment_attention(layout: FlatLayout, loaded_with: str, module, query, key, value, **kwargs):
    """The model's own attention, by groups of like segments ([`AttentionCalls`]): exact on every device and dtype."""
    # Eager functions have no public name
    attend = (
        upstream.attention_function(loaded_with, module)
        if loaded_with == "eager"
        else AttentionInterface()[loaded_with]
    )
    # Functions of the user's own, even under transformers' names, may place queries by the number of keys
    pads = getattr(attend, "__globals__", {}).get("__name__", "").startswith("transformers.")
    calls = AttentionCalls.of(layout, pads)
    # Eager functions add their mask to the scores
    dtype = query.dtype if loaded_with == "eager" else None
    masks = masks_of_calls(layout, kwargs.pop("sliding_window", None), dtype, pads)
    outputs = []
    query, key, value = gathered(query, calls.query_rows), *(gathered(x, calls.key_rows) for x in (key, value))
    numbers = list(map(len, calls.segments))
    lengths, key_lengths = (list(map(mul, numbers, longest)) for longest in (calls.queries, calls.keys))
    # The backward pass of `split` is one concatenation; each slice would get a gradient as long as the flat axis
    inputs = query.split(lengths), key.split(key_lengths), value.split(key_lengths)
    for mask, number, *parts in zip(masks, numbers, *inputs, strict=True):
        q, k, v = (x.unflatten(0, (number, -1)).transpose(1, 2) for x in parts)
        if loaded_with == "eager":  # `matmul` copies several segments, and a view would keep all queries too
            q = q.contiguous()
        outputs.append(attend(module, q, k, v, mask, **kwargs)[0].flatten(0, 1))
    output = torch.cat(outputs)
    return (output if calls.answers is None else Gather.apply(output, calls.answers))[None], None
