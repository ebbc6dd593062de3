"""How a model's layers learn of a flat batch: by the mask that carries the layout, dense masks, or boundaries.

Shape legend: see [`~trl_paddingfree.core.flat.segments`].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import Attended, FlatLayout, once_per_layout
from .architecture import config_value

# How attention is computed over flat batches
BackendName = Literal["flash", "varlen", "segment", "positions", "mask"]
# Fastest first
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# Those that replace the model's attention function; the others keep it, and pass it positions or a dense mask
ATTENTION_BACKENDS: tuple[BackendName, ...] = ("flash", "varlen", "segment")
# transformers' names in `layer_types`; hybrid layers have attention and a state
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NOT_ATTENTION = ("linear_attention", "conv")
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": _SLIDING}
# Models whose image tokens attend to one another in both directions in sliding layers only
_CAUSAL_IN_FULL = ("gemma4_text",)
# transformers' own arguments for the boundaries of a flat batch; our attention reads the layout instead
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Outputs of a recurrence and, if others continue it, its states
Scanned = tuple[torch.Tensor, torch.Tensor | None]
# Weights of a recurrence; `None` where a layer has none
Weights = Sequence[torch.Tensor | None]
# A recurrence over the whole tree, called with inputs and weights. With `cuts`, `number` and `carried`, runs slice
# `number` from carried states. Returns outputs, and the states that later slices read
Scan = Callable[..., Scanned]
# The attention mask of a backbone: one for all layers, or one for each kind
Masks = torch.Tensor | dict[str, "Masks"] | None


class OtherSlices(Protocol):
    """
    How layers that carry state get what they need from other slices of the flat axis: earlier ones
    ([`~trl_paddingfree.slices.decoder.Carry`]), or those of other processes
    ([`~trl_paddingfree.groups.sequence.SequenceGroup`]). Only convolutions and scans ask: nothing else mixes tokens but
    attention.
    """

    def span(self, num_tokens: int) -> range:
        """The flat tokens of this slice, out of `num_tokens`."""

    def with_context(self, layout: FlatLayout, states: torch.Tensor, size: int) -> torch.Tensor:
        """
        States `(t, C)` of the slice, followed by states `(O, C)` of the tokens in other slices that a convolution over
        `size + 1` tokens reads, in flat order.
        """

    def scan(self, layout: FlatLayout, scan: Scan, inputs: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
        """
        The outputs `(1, t, H, ...)` of a `scan` for the slice. The first of its `inputs (1, t, heads, ...)` has all `H`
        heads of the state; others may have fewer, each shared by several of these. Its `weights` are `(H, ...)`.
        """


# Goes around attention: `around(attend, layout, layer, module, query, key, value, **kwargs)` calls `attend` with these
# arguments, or with others. `module` is the `layer` that calls attention, or a copy with some of its heads
Around = Callable[..., Attended]


@dataclass(frozen=True)
class PassContext:
    """
    What a mask carries to the layers of a pass.

    Args:
        layout (`FlatLayout`):
            How the tokens that attention computes lie on the flat axis.
        around (`tuple[Around, ...]`, *optional*):
            What goes around the attention of each layer, outermost first.
        others (`OtherSlices`, *optional*):
            Where layers that carry state get what lies in other slices; `None` if there are none.
    """

    layout: FlatLayout
    around: tuple[Around, ...] = ()
    others: OtherSlices | None = None


class FlatMask(torch.Tensor):
    """
    An attention mask that carries a [`PassContext`].

    transformers passes a 4-D mask through to attention untouched, in every model and under gradient checkpointing,
    whereas some models drop other keyword arguments (StableLM, Nemotron). No dense mask is ever made.
    """

    context: PassContext

    @classmethod
    def carrying(cls, context: PassContext | FlatLayout, per_token: bool = False) -> "FlatMask":
        """A mask on the layout's device: `(1, 1, 1, 1)`, or `(1, t)` as layers that carry state expect it."""
        context = PassContext(context) if isinstance(context, FlatLayout) else context
        shape = [1, 1, 1, 1]
        if per_token:
            total = context.layout.segments.num_tokens
            shape = [1, total if context.others is None else len(context.others.span(total))]
        mask = torch.ones(shape, dtype=torch.bool, device=context.layout.cu_seqlens_q.device).as_subclass(cls)
        mask.context = context
        return mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.all, torch.Tensor.all):  # transformers drops masks that are all true, and this one must stay
            return torch.zeros((), dtype=torch.bool)
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            buffer, source = args[:2]
            if not isinstance(source, cls):  # overwritten: an ordinary tensor from now on
                vars(buffer).clear()
                buffer.__class__ = torch.Tensor
                return func(*args, **kwargs)
            if buffer.shape == source.shape:
                # PyTorch offloads what a checkpoint saves into a buffer, which becomes the mask last copied there
                buffer.__class__ = cls
                vars(buffer).update(vars(source))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            mask = next((x for x in args if isinstance(x, cls)), None)
            if mask is None or result.shape != mask.shape:
                raise RuntimeError(
                    f"the model computes with its attention mask ({func.__name__}): it needs a dense one"
                )
            context = mask.context
            result.context = replace(context, layout=context.layout.to(result.device))
        return result


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


def boundaries(layout: FlatLayout) -> Inputs:
    """The boundaries of a flat batch, as [`~transformers.modeling_flash_attention_utils.FlashAttentionKwargs`]."""
    lengths = (layout.segments.max_seqlen_q, layout.segments.max_seqlen_k)
    return dict(zip(BOUNDARIES, (layout.cu_seqlens_q, layout.cu_seqlens_k, *lengths, layout.seq_idx), strict=True))


def masks_by_kind(model: PreTrainedModel, backend: BackendName, context: PassContext) -> dict[str, Masks]:
    """
    The attention masks of a backbone by transformers' names of the kinds of layers: each is a [`FlatMask`], a dense
    `(1, 1, T, T)` mask in the model's dtype, or `None`.
    """
    config = model.config.get_text_config()
    kinds = set(config_value(config, "layer_types") or ()).difference(NOT_ATTENTION)
    if not kinds:
        kinds = {_FULL if config_value(config, "sliding_window") is None else _SLIDING}
    whole = FlatMask.carrying(context)
    masks: dict[str, Masks] = {}
    for kind in sorted(kinds):
        of_attention, layout, mask = _HYBRID.get(kind, kind), context.layout, None
        if backend != "positions":
            if of_attention == _CHUNKED:
                layout = layout.chunked(config.attention_chunk_size)
            elif of_attention == _FULL and config.model_type in _CAUSAL_IN_FULL:
                layout = layout.without_blocks()
            if backend not in ATTENTION_BACKENDS:
                mask = dense_mask(layout, config.sliding_window if of_attention == _SLIDING else None, model.dtype)
            else:  # attention functions get their window as an argument
                mask = whole if layout is context.layout else FlatMask.carrying(replace(context, layout=layout))
        masks |= dict.fromkeys((kind, of_attention), mask)
    return masks


def attention_arguments(model: PreTrainedModel, backend: BackendName, context: PassContext) -> Inputs:
    """The arguments of a backbone that carry the layout to its attention: one mask, or one for each kind of layer."""
    masks = masks_by_kind(model, backend, context)
    is_one = len(set(map(id, masks.values()))) == 1
    return {"attention_mask": next(iter(masks.values())) if is_one else masks}
