"""Segments as rows again, each with all of its path: for layers that know rows only.

Shape legend: see `segments`; in addition
    G = groups of rows, n = rows of a group, L = longest row of a group
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .layout import FlatLayout


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
    def joined(cls, layout: FlatLayout) -> "PathRows":
        """All paths one after the other, as one row: for what knows of boundaries."""

        def make() -> PathRows:
            segments = layout.segments
            own = _own_slots(layout, segments.cu_seqlens_k[:-1]) if segments.is_shared else None
            return cls(((1, sum(segments.key_lengths)),), None, own)

        return layout.derived("joined paths", make)

    @classmethod
    def of(cls, layout: FlatLayout, step_cost: float) -> "PathRows":
        """The rows of a layout, made once for all layers; `step_cost` is that of [`groups_of_like_length`]."""
        return layout.derived(("path rows", step_cost), lambda: cls._make(layout, step_cost))

    @classmethod
    def _make(cls, layout: FlatLayout, step_cost: float) -> "PathRows":
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
    paths = zip(first_slots.tolist(), segments.starts, segments.lengths, strict=True)
    own = [np.arange(first + start, first + start + length) for first, start, length in paths]
    return layout.tensor(np.concatenate(own))


def groups_of_like_length(lengths: Sequence[int] | np.ndarray, step_cost: float) -> list[list[int]]:
    """
    Rows grouped by length so that computing the groups one after the other costs least. Shortest first.

    A group of `n` rows, the longest of `L` tokens, costs `L * (n + step_cost)`: each step along the longest costs the
    same again, however many rows take it. The best grouping of sorted rows is found exactly.

    >>> groups_of_like_length([100, 9, 104, 10], step_cost=2)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    sorted_lengths = np.asarray([lengths[i] for i in order], dtype=np.float64)
    best, last_start = np.zeros(len(order) + 1), np.zeros(len(order), dtype=np.int64)
    for end in range(1, len(order) + 1):  # the last group holds the rows from some start on
        costs = best[:end] + sorted_lengths[end - 1] * (end - np.arange(end) + step_cost)
        last_start[end - 1] = costs.argmin()
        best[end] = costs[last_start[end - 1]]
    groups, end = [], len(order)
    while end:
        start = int(last_start[end - 1])
        groups.append(order[start:end])
        end = start
    return groups[::-1]
