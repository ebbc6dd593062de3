"""Layers that see rows: each segment's whole path, as one row that starts from nothing.

For each segment such a layer is given its input along the segment's whole path, and the outputs of the segment's own
tokens are kept. A prefix that several segments continue is computed once for each, in these layers only.

Shape legend: see [`~trl_paddingfree.flat.segments`]; in addition
    G = groups of rows, n = rows of a group, L = longest row of a group
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ..flat.layout import FlatLayout
from ..flat.pieces import groups_of_like_length
from .attention import GatherRows
from .masks import BOUNDARIES, FlatMask, causal_mask
from .state_tree import step_cost


@dataclass(frozen=True)
class PathRows:
    """
    One row per segment, its whole path, in groups of about equal length that are padded on the right.

    `slots` of shape `(sum of n * L,)`, int64, is the key row, out of `S`, that stands in each slot of the groups, `S`
    where padding does; `None` if these are the key rows as they are. `own` of shape `(T,)`, int64, is the slot of each
    flat token, in the row of its own segment; `None` if the slots are the flat tokens.
    """

    shapes: tuple[tuple[int, int], ...]  # `G` pairs `(n, L)`
    slots: torch.Tensor | None
    own: torch.Tensor | None

    @classmethod
    def of(cls, layout: FlatLayout, step_cost: float | None) -> "PathRows":
        """
        The rows of a layout, made once for all layers; `step_cost` is that of [`groups_of_like_length`]. `None`: all
        paths one after the other, as one row, for what knows of boundaries.
        """
        make = cls._joined if step_cost is None else partial(cls._grouped, step_cost=step_cost)
        return layout.derived(("path rows", step_cost), partial(make, layout))

    @classmethod
    def _joined(cls, layout: FlatLayout) -> "PathRows":
        segments = layout.segments
        own = _own_slots(layout, segments.cu_seqlens_k[:-1]) if segments.is_shared else None
        return cls(((1, sum(segments.key_lengths)),), None, own)

    @classmethod
    def _grouped(cls, layout: FlatLayout, step_cost: float) -> "PathRows":
        segments, keys = layout.segments, layout.segments.cu_seqlens_k
        shapes: list[tuple[int, int]] = []
        slots: list[np.ndarray] = []
        first_slots, num_slots = np.empty(len(segments.lengths), dtype=np.int64), 0
        for group in groups_of_like_length(segments.key_lengths, step_cost):
            longest = segments.key_lengths[group[-1]]
            first_slots[group] = num_slots + longest * np.arange(len(group))
            num_slots += longest * len(group)
            rows = np.full((len(group), longest), keys[-1], dtype=np.int64)
            for row, i in zip(rows, group, strict=True):
                row[: segments.key_lengths[i]] = np.arange(keys[i], keys[i + 1])
            shapes.append((len(group), longest))
            slots.append(rows.ravel())
        return cls(tuple(shapes), layout.tensor(np.concatenate(slots)), _own_slots(layout, first_slots))


def _own_slots(layout: FlatLayout, first_slots: np.ndarray) -> torch.Tensor:
    """`(T,)` int64: slot of each flat token, from the first slot of each segment's path."""
    segments = layout.segments
    begins = first_slots + np.array(segments.starts) - segments.offsets[:-1]  # less the tokens before each segment
    return layout.tensor(np.repeat(begins, segments.lengths) + np.arange(segments.num_tokens))


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
    rows = PathRows.of(layout, None if takes_boundaries else step_cost(layout.device))
    told = layout.derived("key boundaries", partial(_key_boundaries, layout)) if takes_boundaries else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    cut = _cut((args, kwargs), layout, rows)
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, cut, strict=True):
        if vars(layer).get("is_causal"):  # attention, whose own mask would not know of rows
            window, dtype = vars(layer).get("sliding_window"), next(layer.parameters()).dtype
            group_kwargs["attention_mask"] = causal_mask(layout, n, longest, window, dtype)
        outputs.append(call(*group_args, **group_kwargs, **told))
    # RWKV's blocks give their second layer the state that the first gives back
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


def _key_boundaries(layout: FlatLayout) -> dict[str, Any]:
    """The boundaries of the keys of each segment, as transformers' own arguments: paths one after the other."""
    numbers = np.repeat(np.arange(len(layout.segments.lengths), dtype=np.int32), layout.segments.key_lengths)
    longest = layout.segments.max_seqlen_k
    values = (layout.cu_seqlens_k, layout.cu_seqlens_k, longest, longest, layout.tensor(numbers)[None])
    return dict(zip(BOUNDARIES, values, strict=True))


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
    parts = slots.split([*map(prod, rows.shapes)])
    return [part.unflatten(0, shape) for part, shape in zip(parts, rows.shapes, strict=True)]


def _join(outputs: list[Any], rows: PathRows, state: Any) -> Any:
    """What a layer says of each token, flat, from what it says of each group of rows; `state` stands for the rest."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(parts), rows, state) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor) or outputs[0].shape[:2] != rows.shapes[0]:
        return state
    if rows.own is None:
        return outputs[0]
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.own)[None]
