"""Spans of a flat axis, and what each needs from the tokens before it.

Tokens depend only on earlier ones, so the axis can be cut anywhere: in time (slices, computed one after another), over
processes (the share of each), and at forks (the pieces of layers that carry state). What is common to these lies here,
so that they need not know of each other. Shape legend: see [`~trl_paddingfree.core.flat.segments`].
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from .core.flat.layout import FlatLayout, once_per_layout
from .core.flat.segments import Ints, Segments, something_to_compute

# The window of attention without one: more positions than any row has
NO_WINDOW = 2**62
# What a span reads from the axis before it: a number of tokens before each run, or states of layers
What = int | Literal["states"]


@dataclass(frozen=True)
class Run:
    """The tokens of one segment that lie in a span of the flat axis."""

    length: int
    path: np.ndarray  # the flat tokens of its row, up to the last one of the run

    def reads(self, size: int) -> np.ndarray:
        """Its own tokens, after up to `size` that precede them in its row."""
        return self.path[max(len(self.path) - self.length - size, 0) :]


@dataclass(frozen=True)
class View:
    """
    A span of the flat axis (a slice, what one process computes, or the whole batch): its runs, and what they need from
    the tokens before it.
    """

    span: range
    runs: tuple[Run, ...]
    segments: Segments  # of the whole axis

    @classmethod
    def of(cls, segments: Segments, start: int, stop: int) -> "View":
        """The view of the tokens from `start` up to `stop` or, if there are none, of [`something_to_compute`]."""
        span, runs = something_to_compute(start, stop, segments.num_tokens), []
        for i, (offset, end) in enumerate(pairwise(segments.offsets)):
            first, last = max(span.start, offset), min(span.stop, end)
            if first < last:
                runs.append(Run(last - first, segments.path(i)[: segments.starts[i] + last - offset]))
        return cls(span, tuple(runs), segments)

    @cached_property
    def pieces(self) -> np.ndarray:
        """
        `(5, P)` int64, the runs cut after each fork. For each piece, in flat order: its first token, counted from the
        start of the span; its length; the piece of the span that it continues, or -1; its depth in the tree of these
        pieces; and the flat token that precedes it in its row, or -1.
        """
        start, stop = self.span.start, self.span.stop
        offsets, entered = self.segments.offsets, self.segments.entered
        cuts = np.unique([start, stop, *offsets, *entered + 1])  # also after each fork
        bounds = cuts[(cuts >= start) & (cuts <= stop)]
        firsts, ends = bounds[:-1], bounds[1:]
        before = firsts - 1
        is_start = np.isin(firsts, offsets)
        before[is_start] = entered[np.searchsorted(offsets, firsts[is_start])]
        parents = np.where(before < start, -1, np.searchsorted(ends, before + 1))
        depths: list[int] = []
        for parent in parents.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return np.stack([firsts - start, ends - firsts, parents, depths, before])

    def before(self, what: What) -> np.ndarray:
        """
        Earlier flat tokens that the span needs, int64, ascending: the last `what` tokens before each run in its row, or
        those whose states the runs continue.
        """
        tokens = self.pieces[4] if what == "states" else np.concatenate([run.reads(what) for run in self.runs])
        return np.unique(tokens[(tokens >= 0) & (tokens < self.span.start)])


@once_per_layout
def handed_on(layout: FlatLayout, cuts: Ints, what: What) -> list[tuple[View, np.ndarray, np.ndarray]]:
    """
    For each span between `cuts`, flat positions that include 0 and `T`: its view, the earlier tokens that it needs, and
    its own tokens that later spans need. Both are ascending; see [`View.before`].
    """
    views = [View.of(layout.segments, start, stop) for start, stop in pairwise(cuts)]
    reads = [view.before(what) for view in views]
    last = np.full(cuts[-1], -1)  # the last span that reads each token
    for number, tokens in enumerate(reads):
        last[tokens] = number
    kept = [start + np.flatnonzero(last[start:stop] > i) for i, (start, stop) in enumerate(pairwise(cuts))]
    return list(zip(views, reads, kept, strict=True))


def cut_by_number(total: int, number: int, blocks: np.ndarray | None = None) -> Ints:
    """
    Where to cut `total` tokens into `number` slices of about equal size; some may be empty and, but
    for cuts that move out of image blocks, none has one token.

    >>> cut_by_number(10, 4), cut_by_number(5, 4)
    ((0, 2, 5, 7, 10), (0, 0, 2, 2, 5))
    """
    step = 1 if total >= 2 * number else 2
    cuts = [step * (i * (total // step) // number) for i in range(number)]
    return tuple(out_of_block(cut, blocks, -1) for cut in (*cuts, total))


def out_of_block(cut: int, blocks: np.ndarray | None, step: int) -> int:
    """Move a cut within an image block to its begin or end, by the sign of `step`: its tokens see those that follow."""
    while blocks is not None and 0 < cut < len(blocks) and blocks[cut] >= 0 and blocks[cut] == blocks[cut - 1]:
        cut += step
    return cut
