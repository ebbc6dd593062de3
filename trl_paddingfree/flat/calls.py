"""Which segments a call of plain attention computes: short ones of about one shape together, long ones alone.

Shape legend: see `segments`; in addition
    C = calls, n = segments of a call, Q, L = most queries and keys of a segment of a call
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .layout import FlatLayout, RowIndex

# Query-key pairs of padding that a call may have for each segment that it saves a call of its own. On a CPU, a call
# costs the host about 0.1 ms, as much as 1,000 pairs of 600 channels; on a GPU, it costs more pairs than that
PAIRS_OF_A_CALL = 1024
# Bringing states into the order of the calls, and answers out of it, costs as much as some calls
_CALLS_OF_AN_ORDER = 4


@dataclass(frozen=True)
class AttentionCalls:
    """
    Calls of attention that compute every segment once.

    Args:
        segments (`tuple[tuple[int, ...], ...]`):
            The segments of each of the `C` calls.
        queries (`tuple[int, ...]`), keys (`tuple[int, ...]`):
            `Q` and `L` of each call. Shorter segments are padded on the right.
        query_rows (`RowIndex`, *optional*):
            Flat position of each query row of all calls, `n * Q` for each. `None`: queries lie as they are needed.
        key_rows (`RowIndex`, *optional*):
            The same of each key row, `n * L` for each. `None`: states lie as they are needed.
        answers (`RowIndex`, *optional*):
            Query row of all calls that answers for each of the `T` tokens. `None`: they lie like the tokens.
    """

    segments: tuple[tuple[int, ...], ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_rows: RowIndex | None
    key_rows: RowIndex | None
    answers: RowIndex | None

    @classmethod
    def of(cls, layout: FlatLayout) -> "AttentionCalls":
        """The calls of a layout, made once for all layers."""
        return layout.derived("calls", lambda: cls._make(layout))

    @property
    def num_pairs(self) -> int:
        """Query-key pairs of all calls, those of padding among them."""
        return sum(len(call) * q * k for call, q, k in zip(self.segments, self.queries, self.keys, strict=True))

    @classmethod
    def _make(cls, layout: FlatLayout) -> "AttentionCalls":
        segments = layout.segments
        lengths, key_lengths, starts = segments.lengths, segments.key_lengths, segments.starts
        if layout.blocks is not None:  # each segment has a mask of its own
            calls = [[i] for i in range(len(lengths))]
        else:
            calls = [list(run) for _, run in groupby(range(len(lengths)), lambda i: (lengths[i], key_lengths[i]))]
            grouped = segments_of_like_shape(lengths, key_lengths)
            if len(grouped) + _CALLS_OF_AN_ORDER < len(calls):
                calls = grouped
        queries, keys = ([max(sizes[i] for i in call) for call in calls] for sizes in (lengths, key_lengths))
        parts = tuple(map(tuple, calls)), tuple(queries), tuple(keys)
        num_tokens, is_ordered = segments.num_tokens, sum(calls, []) == list(range(len(lengths)))
        if is_ordered and sum(len(call) * most for call, most in zip(calls, queries, strict=True)) == num_tokens:
            return cls(*parts, None, layout.kv_rows, None)

        query_rows: list[np.ndarray] = []
        key_rows: list[np.ndarray] = []
        answers, first = np.empty(num_tokens, dtype=np.int64), 0
        for call, most_queries, most_keys in zip(*parts, strict=True):
            for i in call:
                path, own = segments.path(i), segments.path(i)[starts[i] :]
                answers[own] = np.arange(first, first + lengths[i])
                first += most_queries
                query_rows.append(_padded(own, most_queries))
                key_rows.append(_padded(path, most_keys))
        rows = [RowIndex.of(np.concatenate(index), num_tokens) for index in (query_rows, key_rows)]
        rows.append(RowIndex.of(answers, first))
        return cls(*parts, *(index.map(lambda x: x.to(layout.device, non_blocking=True)) for index in rows))


def _padded(positions: np.ndarray, length: int) -> np.ndarray:
    """`positions`, the last of them repeated up to `length`."""
    return np.pad(positions, (0, length - len(positions)), mode="edge")


def segments_of_like_shape(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[list[int]]:
    """
    Group segments so that the padding of a group costs less than calls of its segments alone.

    Segments that continue others need a mask and those that do not need none, so that they are never together.

    Args:
        lengths (`Sequence[int]`), key_lengths (`Sequence[int]`):
            Queries and keys of each segment.

    Returns:
        `list[list[int]]`: The segments of each group.

    Examples:
    ```python
    >>> from trl_paddingfree.flat.calls import segments_of_like_shape
    >>> segments_of_like_shape([30, 400, 28, 5, 400], [30, 400, 28, 33, 400])
    [[1, 4], [0, 2], [3]]

    ```
    """
    is_branch = [keys > length for length, keys in zip(lengths, key_lengths, strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: (is_branch[i], -key_lengths[i], -lengths[i]))
    groups: list[list[int]] = []
    queries = keys = 0
    for i in order:
        if groups and is_branch[groups[-1][0]] == is_branch[i]:  # keys are those of the first, which has most
            more = max(queries, lengths[i])
            padding = (more - queries) * keys * len(groups[-1]) + more * keys - lengths[i] * key_lengths[i]
            if padding <= PAIRS_OF_A_CALL:
                groups[-1].append(i)
                queries = more
                continue
        groups.append([i])
        queries, keys = lengths[i], key_lengths[i]
    return groups
