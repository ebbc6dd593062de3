"""How layers that carry state run along rows that share prefixes: piece by piece, or over whole rows if they must.

Shape legend: see `segments`; in addition
    P = pieces, G = calls, n = pieces or rows of a call, L = the longest of them, S = slots (the sum of n * L)

A piece is a stretch of tokens between two forks of the tree. A recurrence starts it from the final state of the piece
before it, so each token is computed once. Pieces of equal depth form a level: they are independent.

    flat     0  1  2  3  4  5 | 6  7  8      segment 1 continues the first two tokens of segment 0
    pieces   ----  ----------   -------      0, 1, 2
    level    0     1            1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.flat.layout import FlatLayout, GatherIndex, once_per_layout
from ..spans import View, handed_on


@dataclass(frozen=True)
class PieceCall:
    """Pieces of one level that are computed in one call."""

    shape: tuple[int, int]  # rows of the call and their length: `(n, L)`, padded on the right, or `(1, tokens)`, packed
    parents: GatherIndex | None  # piece of the previous level, or state of an earlier slice, that each continues
    boundaries: torch.Tensor | None  # (n + 1,) int32: boundaries of packed pieces; `None` if each has its own row


@dataclass(frozen=True)
class Pieces:
    """
    All pieces of a layout, in the order in which they are computed.

    >>> from trl_paddingfree import Segments
    >>> layout = FlatLayout.from_segments(Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 2)))
    >>> pieces = Pieces.of(layout, step_cost=8)
    >>> [[call.shape for call in level] for level in pieces.levels]
    [[(1, 2)], [(2, 4)]]
    >>> pieces.levels[1][0].parents.index.tolist(), pieces.slots.index.tolist(), pieces.slots.empty.tolist()
    ([0, 0], [0, 1, 6, 7, 8, 0, 2, 3, 4, 5], [5])
    """

    levels: tuple[tuple[PieceCall, ...], ...]  # the calls of each level
    slots: GatherIndex  # the flat token in each of `S` slots, call by call; none at padding
    own: GatherIndex  # the slot of each flat token
    kept: GatherIndex | None = None  # pieces whose final state a later slice needs, in order; `None` if none

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, step_cost: float | None, cuts: tuple[int, ...] = (), number: int = 0) -> "Pieces":
        """
        The pieces of a layout or, with `cuts`, of its slice `number`. With a `step_cost`, each call pads pieces of
        similar length, see [`groups_of_like_length`]. With `None`, each level is one call of packed pieces.
        """
        view, reads, kept = handed_on(layout, cuts or (0, layout.segments.num_tokens), "states")[number]
        firsts, lengths, parents, depths, before = view.pieces
        enters = np.isin(before, reads)
        place = np.empty(len(parents), np.int64)  # index of each piece within its level, call by call
        slots = []
        levels, sizes = [], np.bincount(depths)
        for depth in range(len(sizes)):
            level, calls = np.flatnonzero(depths == depth), []
            groups = [level]
            if step_cost is not None:
                groups = [level[group] for group in groups_of_like_length(lengths[level], step_cost)]
            for members in groups:
                places = np.arange(lengths[members].max())
                rows = np.where(places < lengths[members, None], firsts[members, None] + places, -1)
                boundaries = None
                if step_cost is None:
                    rows = rows[rows >= 0][None]
                    boundaries = layout.tensor(np.append(0, lengths[members].cumsum()).astype(np.int32))
                initial = layout.gather_index(place[parents[members]], sizes[depth - 1]) if depth else None
                if enters[members].any():  # in the first level only
                    states = np.where(enters, np.searchsorted(reads, before), -1)
                    initial = layout.gather_index(states[members], len(reads))
                calls.append(PieceCall(rows.shape, initial, boundaries))
                slots.append(rows.ravel())
            levels.append(tuple(calls))
            place[np.concatenate(groups)] = np.arange(len(level))
        tokens = np.concatenate(slots)
        own = np.argsort(tokens, kind="stable")[-lengths.sum() :]  # slots without a token, -1, sort first
        ends = None
        if len(kept):  # indices among the pieces of all levels
            of_kept = np.searchsorted(view.span.start + firsts + lengths - 1, kept)
            ends = layout.gather_index(((np.cumsum(sizes) - sizes)[depths] + place)[of_kept], len(depths))
        return Pieces(tuple(levels), layout.gather_index(tokens, len(own)), layout.gather_index(own, len(tokens)), ends)


@dataclass(frozen=True)
class Context:
    """
    An axis for convolutions, on which each run of a slice follows the tokens that precede it in its row. It is gathered
    from the states of the slice, followed by those of the earlier tokens that it needs.

    >>> from trl_paddingfree import Segments
    >>> layout = FlatLayout.from_segments(Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 2)))
    >>> context = Context.of(layout, 2, range(5, 8))
    >>> context.rows.index.tolist(), context.places.tolist()  # tokens 5, 6 and 7, and behind them 0, 1, 3 and 4
    ([5, 6, 0, 3, 4, 1, 2], [2, 5, 6])
    """

    rows: GatherIndex  # the state in each place; none where a row has fewer tokens before a run
    places: torch.Tensor  # (t,) int64: the place of each token of the slice

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, size: int, span: range) -> "Context":
        """The axis of a slice with `size` tokens before each run, on the layout's device."""
        view = View.of(layout.segments, span.start, span.stop)
        before, none = view.before(size), np.full(size, -1)
        index = np.concatenate([np.append(none, run.reads(size))[-run.length - size :] for run in view.runs])
        places = [run.reads(0) - span.start + number * size for number, run in enumerate(view.runs, 1)]
        outside = len(span) + np.searchsorted(before, index)
        index = np.where(np.isin(index, before), outside, np.maximum(index - span.start, -1))
        return Context(layout.gather_index(index, len(span) + len(before)), layout.tensor(np.concatenate(places)))


@dataclass(frozen=True)
class PathRows:
    """
    One row per segment, its whole path, in calls of rows of similar length. `slots` and `own` are `None` if the flat
    axis as it is makes up the only call.
    """

    shapes: tuple[tuple[int, int], ...]  # `G` pairs `(n, L)`
    slots: GatherIndex | None  # the flat token in each of `S` slots, call by call; none at padding
    own: torch.Tensor | None  # (T,) int64: the slot of each flat token, in the row of its own segment

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, step_cost: float | None) -> "PathRows":
        """The rows of a layout. For `step_cost`, see [`groups_of_like_length`]; with `None`, all paths form one row."""
        segments, total = layout.segments, layout.segments.num_tokens
        if step_cost is None and not segments.is_shared:
            return PathRows(((1, total),), None, None)
        lengths, size = segments.key_lengths, 0
        groups = [[i] for i in range(len(lengths))] if step_cost is None else groups_of_like_length(lengths, step_cost)
        slots = []
        firsts = np.empty(len(lengths), np.int64)  # the slot where the row of each segment begins
        for group in groups:
            longest = lengths[group[-1]]
            for i in group:
                slots.append(np.pad(segments.path(i), (0, longest - lengths[i]), constant_values=-1))
                firsts[i] = size
                size += longest
        own = np.repeat(firsts, segments.lengths) + segments.position_ids
        shapes = [(len(group), lengths[group[-1]]) for group in groups] if step_cost is not None else [(1, size)]
        return PathRows(tuple(shapes), layout.gather_index(np.concatenate(slots), total), layout.tensor(own))


def groups_of_like_length(lengths: Sequence[int] | np.ndarray, step_cost: float) -> list[list[int]]:
    """
    Group rows by length so that computing one group after another costs least. Shortest first.

    A group of `n` rows, the longest of `L` tokens, costs `L * (n + step_cost)`: each step has a fixed cost on top,
    however many rows take it. Dynamic programming finds the optimal grouping of the sorted rows.

    >>> groups_of_like_length([100, 9, 104, 10], step_cost=2)
    [[1, 3], [0, 2]]
    """
    order = np.argsort(lengths, kind="stable").tolist()
    sorted_lengths = np.asarray(lengths, np.float64)[order]
    best, last_start = np.zeros(len(order) + 1), np.zeros(len(order), np.int64)
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
