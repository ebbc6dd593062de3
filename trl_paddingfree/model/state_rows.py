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

from ..flat.layout import FlatLayout, RowIndex
from ..flat.pieces import groups_of_like_length
from ..flat.segments import Segments
from .attention import GatherRows
from .masks import BOUNDARIES, FlatMask, boundaries, causal_mask
from .state_tree import step_cost


@dataclass(frozen=True)
class PathRows:
    """
    One row per segment, its whole path, in groups of about equal length that are padded on the right.

    `slots` is the flat token in each of `sum of n * L` slots of the groups, none where a row is padded. `own` of shape
    `(T,)`, int64, is the slot of each flat token, in the row of its own segment. `None`: the slots are the flat tokens.
    """

    shapes: tuple[tuple[int, int], ...]  # `G` pairs `(n, L)`
    slots: RowIndex | None
    own: torch.Tensor | None

    @classmethod
    def of(cls, layout: FlatLayout, step_cost: float | None) -> "PathRows":
        """The rows of a layout, made once. `step_cost`: see [`groups_of_like_length`]; `None`: all paths as one row."""
        return layout.derived(("path rows", step_cost), partial(cls._make, layout, step_cost))

    @classmethod
    def _make(cls, layout: FlatLayout, step_cost: float | None) -> "PathRows":
        segments, total = layout.segments, layout.segments.num_tokens
        if step_cost is None and not segments.is_shared:
            return cls(((1, total),), None, None)
        lengths, size = segments.key_lengths, 0
        groups = [[*range(len(lengths))]] if step_cost is None else groups_of_like_length(lengths, step_cost)
        shapes: list[tuple[int, int]] = []
        slots: list[np.ndarray] = []
        own = np.empty(total, dtype=np.int64)
        for group in groups:
            longest = 0 if step_cost is None else lengths[group[-1]]
            for i in group:
                slots += [segments.path(i), np.full(max(longest - lengths[i], 0), -1)]
                own[segments.offsets[i] : segments.offsets[i + 1]] = size + np.arange(segments.starts[i], lengths[i])
                size += max(longest, lengths[i])
            shapes.append((1, size) if step_cost is None else (len(group), longest))
        return cls(tuple(shapes), layout.row_index(np.concatenate(slots), total), layout.tensor(own))


def is_layout(value: Any) -> bool:
    """Whether an argument is the mask that carries the layout."""
    # A model may put its tokens where its mask says, which gives tokens that carry the layout too
    return isinstance(value, FlatMask) and value.dtype == torch.bool


def on_rows(
    layer: torch.nn.Module, call: Callable, mask: FlatMask, takes_boundaries: bool, args: tuple, kwargs: dict
) -> Any:
    """
    Call a layer by its forward `call` on the path of each segment, and keep what it says of the segments' own tokens.

    `mask` is the one among its arguments that carries the layout; of the others, everything that has an entry per token
    is cut into rows. With `takes_boundaries` it is called once, on one long axis, and told of boundaries.
    """
    layout = mask.flat_layout
    rows = PathRows.of(layout, None if takes_boundaries else step_cost(layout.device))

    def paths() -> FlatLayout:  # one after the other, as rows that share nothing
        unshared = Segments.from_lengths(layout.segments.key_lengths)
        return FlatLayout.from_segments(unshared).to(layout.device, non_blocking=True)

    told = boundaries(layout.derived("paths", paths)) if takes_boundaries else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    cut = _cut((args, kwargs), layout, rows)
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, cut, strict=True):
        if vars(layer).get("is_causal"):  # attention, whose own mask would not know of rows
            states = next(filter(torch.is_tensor, (*group_args, *group_kwargs.values())))
            window = vars(layer).get("sliding_window")
            group_kwargs["attention_mask"] = causal_mask(layout, n, longest, window, states.dtype)
        outputs.append(call(*group_args, **group_kwargs, **told))
    # RWKV's blocks give their second layer the state that the first gives back
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


def _cut(value: Any, layout: FlatLayout, rows: PathRows) -> list[Any]:
    """`value` for each group of rows: what has an entry per token is cut, what carries the layout is left out."""
    if isinstance(value, tuple | list):
        parts = [_cut(item, layout, rows) for item in value]
        return [type(value)(group) for group in zip(*parts, strict=True)] if parts else [value] * len(rows.shapes)
    if isinstance(value, dict):
        return [dict(zip(value, group, strict=True)) for group in _cut((*value.values(),), layout, rows)]
    if is_layout(value):
        return [None] * len(rows.shapes)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, layout.segments.num_tokens):
        return [value] * len(rows.shapes)
    states = value.as_subclass(torch.Tensor).squeeze(0)
    if rows.slots is None:
        return [states[None]]
    parts = GatherRows.apply(states, rows.slots).split([*map(prod, rows.shapes)])
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
