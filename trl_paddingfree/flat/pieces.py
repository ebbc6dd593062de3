"""For layers that carry state: pieces, which hand their last state on where rows fork, or whole rows if they cannot.

Shape legend: see `segments`; in addition
    P = pieces, G = calls, n = pieces or rows of a call, L = the longest of them, S = slots (the sum of n * L)

A state can go on from piece to piece: each begins where another ends. Those that are as far from the start of their
rows, in pieces, are a level of the tree, and do not depend on one another:

    flat     0  1  2  3  4  5 | 6  7  8      segment 1 continues the first two tokens of segment 0
    pieces   ----  ----------   -------      0, 1, 2
    level    0     1            1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .layout import FlatLayout, RowIndex, once_per_layout
from .segments import Segments


@dataclass(frozen=True)
class PieceCall:
    """Pieces of one level that are computed in one call."""

    shape: tuple[int, int]  # rows of the call, and tokens of each: `(n, L)`, padded on the right, or all as `(1, S)`
    parents: RowIndex | None  # the piece of the level before that each continues; `None`: all start from nothing
    boundaries: torch.Tensor | None  # (n + 1,) int32: of pieces one after the other; `None` if each has a row


@dataclass(frozen=True)
class Pieces:
    """
    All pieces of a layout, in the order in which they are computed.

    >>> layout = FlatLayout.from_segments(Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 2)))
    >>> pieces = Pieces.of(layout, step_cost=8)
    >>> [[call.shape for call in level] for level in pieces.levels]
    [[(1, 2)], [(2, 4)]]
    >>> pieces.levels[1][0].parents.index.tolist(), pieces.slots.index.tolist(), pieces.slots.empty.tolist()
    ([0, 0], [0, 1, 6, 7, 8, 0, 2, 3, 4, 5], [5])
    """

    levels: tuple[tuple[PieceCall, ...], ...]  # the calls of each level
    slots: RowIndex  # the flat token in each of `S` slots, call by call; none, where a piece is padded
    own: RowIndex  # the slot of each flat token

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, step_cost: float | None) -> "Pieces":
        """
        The pieces of a layout. `step_cost` is that of [`groups_of_like_length`], by which the pieces of a level become
        calls; `None`: each level is one call, in which pieces stand one after the other.
        """
        firsts, lengths, parents, depths = cut_at_forks(layout.segments)
        place = np.empty(len(parents), dtype=np.int64)  # of each piece among those of its level, in their calls' order
        slots: list[np.ndarray] = []
        levels, earlier = [], 0
        for depth in range(depths.max() + 1):
            level, calls = np.flatnonzero(depths == depth), []
            alike = [] if step_cost is None else groups_of_like_length(lengths[level], step_cost)
            groups = [level[group] for group in alike] or [level]
            for members in groups:
                places = np.arange(lengths[members].max())
                rows = np.where(places < lengths[members, None], firsts[members, None] + places, -1)
                boundaries = None
                if step_cost is None:
                    rows = rows[rows >= 0][None]
                    boundaries = layout.tensor(np.concatenate([[0], lengths[members].cumsum()]).astype(np.int32))
                starts = layout.row_index(place[parents[members]], earlier) if depth else None
                calls.append(PieceCall(rows.shape, starts, boundaries))
                slots.append(rows.ravel())
            levels.append(tuple(calls))
            place[np.concatenate(groups)] = np.arange(len(level))
            earlier = len(level)
        tokens = np.concatenate(slots)
        own = np.empty(layout.segments.num_tokens, dtype=np.int64)
        own[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
        return Pieces(tuple(levels), layout.row_index(tokens, len(own)), layout.row_index(own, len(tokens)))


def cut_at_forks(segments: Segments) -> tuple[np.ndarray, ...]:
    """
    Segments cut where others continue them. Of each piece, in the order of the flat axis, `(P,)` int64: its first
    token, its length, the piece that it continues or -1, and how many there are before it on its path.
    """
    cuts = [{end} for end in segments.key_lengths]
    for holder, start in zip(segments.holders, segments.starts, strict=True):
        if holder != -1:
            cuts[holder].add(start)
    pieces: list[tuple[int, int, int, int]] = []
    ended: dict[tuple[int, int], int] = {}  # the piece of a segment that ends at a position
    for i, (holder, start) in enumerate(zip(segments.holders, segments.starts, strict=True)):
        before, begin = ended.get((holder, start), -1), start
        for end in sorted(cuts[i]):
            depth = 0 if before == -1 else pieces[before][3] + 1
            pieces.append((segments.offsets[i] + begin - start, end - begin, before, depth))
            before = ended[i, end] = len(pieces) - 1
            begin = end
    return tuple(np.array(pieces, dtype=np.int64).T)


def with_context(segments: Segments, size: int, span: range) -> tuple[np.ndarray, np.ndarray]:
    """
    One axis for a slice of the flat axis, or for all of it, on which the `size` tokens before each run on its path
    stand before it: the flat token in each place, or -1, and the place of each token of the slice, `(t,)`; all int64.
    A run is what the slice has of a segment.

    >>> with_context(Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 2)), 2, range(5, 8))
    (array([3, 4, 5, 0, 1, 6, 7]), array([2, 5, 6]))
    """
    index: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for i, (offset, start, length) in enumerate(zip(segments.offsets, segments.starts, segments.lengths, strict=False)):
        first, last = max(span.start, offset), min(span.stop, offset + length)
        if first < last:
            start += first - offset
            path = segments.path(i)[max(start - size, 0) : start + last - first]
            index += [np.full(max(size - start, 0), -1), path]
            places.append(np.arange(first, last) - span.start + (len(places) + 1) * size)
    return np.concatenate(index), np.concatenate(places)


def tokens_before(segments: Segments, size: int, span: range) -> np.ndarray:
    """The flat tokens among those of [`with_context`] that a slice does not have, ascending, int64: all before it."""
    index, _ = with_context(segments, size, span)
    return np.unique(index[(index >= 0) & (index < span.start)])


@dataclass(frozen=True)
class Context:
    """The axis of [`with_context`], for states of a slice that are followed by those of [`tokens_before`] it."""

    rows: RowIndex  # which of these states is in each place, or none
    places: torch.Tensor  # (t,) int64: the place of each token of the slice

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, size: int, span: range) -> "Context":
        """The axis of a slice on the layout's device."""
        index, places = with_context(layout.segments, size, span)
        outside = (index >= 0) & (index < span.start)
        before = np.unique(index[outside])  # `tokens_before`
        index = np.where(outside, len(span) + np.searchsorted(before, index), index - span.start * (index >= 0))
        return Context(layout.row_index(index, len(span) + len(before)), layout.tensor(places))


@dataclass(frozen=True)
class PathRows:
    """
    One row per segment, its whole path, in calls of rows of about equal length. `slots` and `own` are `None` if the
    flat axis as it is makes one call.
    """

    shapes: tuple[tuple[int, int], ...]  # `G` pairs `(n, L)`
    slots: RowIndex | None  # the flat token in each of `S` slots, call by call; none, where a row is padded
    own: torch.Tensor | None  # (T,) int64: the slot of each flat token, in the row of its own segment

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, step_cost: float | None) -> "PathRows":
        """The rows of a layout. `step_cost`: see [`groups_of_like_length`]; `None`: all paths as one row."""
        segments, total = layout.segments, layout.segments.num_tokens
        if step_cost is None and not segments.is_shared:
            return PathRows(((1, total),), None, None)
        lengths, size = segments.key_lengths, 0
        groups = [[i] for i in range(len(lengths))] if step_cost is None else groups_of_like_length(lengths, step_cost)
        slots: list[np.ndarray] = []
        own = np.empty(total, dtype=np.int64)
        for group in groups:
            longest = lengths[group[-1]]
            for i in group:
                slots.append(np.pad(segments.path(i), (0, longest - lengths[i]), constant_values=-1))
                own[segments.offsets[i] : segments.offsets[i + 1]] = size + np.arange(segments.starts[i], lengths[i])
                size += longest
        shapes = [(len(group), lengths[group[-1]]) for group in groups] if step_cost is not None else [(1, size)]
        return PathRows(tuple(shapes), layout.row_index(np.concatenate(slots), total), layout.tensor(own))


def groups_of_like_length(lengths: Sequence[int] | np.ndarray, step_cost: float) -> list[list[int]]:
    """
    Rows grouped by length so that computing the groups one after the other costs least. Shortest first.

    A group of `n` rows, the longest of `L` tokens, costs `L * (n + step_cost)`: each step along the longest costs the
    same again, however many rows take it. The best grouping of sorted rows is found exactly.

    >>> groups_of_like_length([100, 9, 104, 10], step_cost=2)
    [[1, 3], [0, 2]]
    """
    order = np.argsort(lengths, kind="stable").tolist()
    sorted_lengths = np.asarray(lengths, dtype=np.float64)[order]
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
