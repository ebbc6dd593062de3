"""The flat axis in slices of about equal length, one for each process of a group. Shape legend: see `segments`."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from .batch import IGNORE_INDEX, FlatBatch


def cuts(total: int, size: int) -> tuple[int, ...]:
    """
    Where `total` tokens, or heads, are cut into `size` slices: `size + 1` ints.

    >>> cuts(10, 4), slice_sizes(10, 4)
    ((0, 2, 5, 7, 10), (2, 3, 2, 3))
    """
    return tuple(i * total // size for i in range(size + 1))


def slice_sizes(total: int, size: int) -> tuple[int, ...]:
    """How many of `total` tokens, or heads, lie in each of `size` slices. Some are 0 if `total` is less than `size`."""
    return tuple(last - first for first, last in pairwise(cuts(total, size)))


def scored_sizes(batch: FlatBatch, size: int) -> tuple[int, ...]:
    """How many scored tokens of a batch lie in each of `size` slices."""
    return tuple(np.diff(np.searchsorted(batch.scored, cuts(batch.layout.segments.num_tokens, size))).tolist())


def slice_of(batch: FlatBatch, number: int, size: int, group: Any = None) -> FlatBatch:
    """
    Slice `number` of `size` of a batch: its tokens and labels, with the rows and the layout of the whole, which knows
    the `group` whose processes have the slices.

    The host knows where slices begin and what they score, so that nothing is read from the device. A slice without
    tokens has one of its neighbour's, and one without scored tokens a label of -100: models need something to compute.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> [slice_of(batch, number, 2).input_ids.tolist() for number in range(2)]
    [[[1, 2, 3]], [[4, 2, 5]]]
    >>> [slice_of(batch, number, 2).shift_labels.tolist() for number in range(2)]
    [[[3, 4]], [[5]]]
    """
    ends = cuts(batch.layout.segments.num_tokens, size)
    first, last = ends[number], ends[number + 1]
    tokens, (begin, end) = slice(first, max(last, first + 1)), np.searchsorted(batch.scored, (first, last)).tolist()
    labels, scored_index = batch.shift_labels[:, begin:end], batch.scored_index[begin:end] - first
    if begin == end:
        labels, scored_index = labels.new_full((1, 1), IGNORE_INDEX), scored_index.new_zeros(1)
    return replace(
        batch,
        layout=batch.layout.derived("slices", lambda: replace(batch.layout, group=group)),
        input_ids=batch.input_ids[:, tokens],
        position_ids=batch.position_ids[:, tokens],
        token_rows=batch.token_rows[:, tokens],
        shift_labels=labels,
        scored_index=scored_index,
    )
