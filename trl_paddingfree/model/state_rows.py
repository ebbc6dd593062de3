"""Layers that see rows: each segment's whole path, as one row that starts from nothing.

For each segment such a layer is given its input along the segment's whole path, and the outputs of the segment's own
tokens are kept. A prefix that several segments continue is computed once for each, in these layers only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..flat.layout import FlatLayout
from ..flat.path_rows import PathRows
from .attention import GatherRows
from .masks import BOUNDARIES, FlatMask, causal_mask
from .state_tree import step_cost


def is_layout(value: Any) -> bool:
    """Whether an argument is the mask that carries the layout."""
    # A model may put its tokens where its mask says, which gives tokens that carry the layout too
    return isinstance(value, FlatMask) and value.dtype == torch.bool


def on_rows(
    layer: torch.nn.Module,
    call: Callable[..., Any],
    mask: FlatMask,
    takes_boundaries: bool,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """
    Call a layer by its forward `call` on the path of each segment, and keep what it says of the segments' own tokens.

    `mask` is the one among its arguments that carries the layout; of the others, everything that has an entry per token
    is cut into rows. With `takes_boundaries` it is called once, on one long axis, and told of boundaries.
    """
    layout = mask.flat_layout
    rows = PathRows.joined(layout) if takes_boundaries else rows_of(layout)
    told = key_boundaries(layout) if takes_boundaries else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    cut = _cut((args, kwargs), layout, rows)
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, cut, strict=True):
        if getattr(layer, "is_causal", False):  # attention, whose own mask would not know of rows
            window = getattr(layer, "sliding_window", None)
            dtype = next(layer.parameters()).dtype
            group_kwargs["attention_mask"] = causal_mask(layout, n, longest, window, dtype)
        outputs.append(call(*group_args, **group_kwargs, **told))
    # RWKV's blocks give their second layer the state that the first gives back
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


def rows_of(layout: FlatLayout) -> PathRows:
    """The rows of a layout, grouped by length as is fastest on its device."""
    return PathRows.of(layout, step_cost(layout.device))


def key_boundaries(layout: FlatLayout) -> dict[str, Any]:
    """The boundaries of the keys of each segment, as transformers' own arguments: paths one after the other."""

    def make() -> dict[str, Any]:
        numbers = np.repeat(np.arange(len(layout.segments.lengths), dtype=np.int32), layout.segments.key_lengths)
        seq_idx = layout.tensor(numbers)[None]
        longest = layout.segments.max_seqlen_k
        values = (layout.cu_seqlens_k, layout.cu_seqlens_k, longest, longest, seq_idx)
        return dict(zip(BOUNDARIES, values, strict=True))

    return layout.derived("key boundaries", make)


def _cut(value: Any, layout: FlatLayout, rows: PathRows) -> list[Any]:
    """`value` for each group of rows: what has an entry per token is cut, what carries the layout is left out."""
    if isinstance(value, tuple | list):
        parts = [_cut(item, layout, rows) for item in value]
        return [type(value)(group) for group in zip(*parts, strict=True)] if parts else [value] * len(rows.shapes)
    if isinstance(value, dict):
        parts = [_cut(item, layout, rows) for item in value.values()]
        groups = zip(*parts, strict=True) if parts else [()] * len(rows.shapes)
        return [dict(zip(value, group, strict=True)) for group in groups]
    if is_layout(value):
        return [None] * len(rows.shapes)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, layout.segments.num_tokens):
        return [value] * len(rows.shapes)
    keys = value.as_subclass(torch.Tensor).squeeze(0)
    if layout.kv_rows is not None:
        floating = keys.is_floating_point()
        keys = GatherRows.apply(keys, layout.kv_rows) if floating else keys.index_select(0, layout.kv_rows.index)
    if rows.slots is None:
        return [keys[None]]
    slots = torch.cat([keys, keys.new_zeros(1, *keys.shape[1:])]).index_select(0, rows.slots)
    sizes = [n * longest for n, longest in rows.shapes]
    return [part.unflatten(0, shape) for part, shape in zip(slots.split(sizes), rows.shapes, strict=True)]


def _join(outputs: list[Any], rows: PathRows, state: Any) -> Any:
    """What a layer says of each token, flat, from what it says of each group of rows; `state` stands for the rest."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(parts), rows, state) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor) or outputs[0].shape[:2] != rows.shapes[0]:
        return state
    if rows.own is None:
        return outputs[0]
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.own)[None]
