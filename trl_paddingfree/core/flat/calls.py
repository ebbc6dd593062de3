"""Groups segments into calls of SDPA or eager attention: short ones of similar shape together, long ones alone.

Shape legend: see `segments`; in addition
    C = calls, n = segments of a call, Q, L = queries and keys of its longest segment
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from .layout import FlatLayout, GatherIndex, once_per_layout
from .segments import Ints

# A segment joins a call if that pads at most this many query-key pairs, and at most this multiple of its own pairs.
# A call costs the host about 0.1 ms: on a CPU, as much as 1,000 pairs of 600 channels; on a GPU, as much as more pairs
PAIRS_OF_A_CALL, PADDED_SHARE = 1024, 1
# Reordering queries, keys and values for the calls, and outputs back, costs as much as this many calls
_CALLS_OF_AN_ORDER = 4


@dataclass(frozen=True)
class AttentionCalls:
    """
    Attention calls that compute every segment once; shorter segments of a call are padded on the right. An index of
    `None` means the flat axis as it is.
    """

    segments: tuple[Ints, ...]  # the segments of each of the `C` calls
    queries: Ints  # `Q` of each call
    keys: Ints  # `L` of each call
    query_rows: GatherIndex | None  # flat position of each query row, `n * Q` per call
    key_rows: GatherIndex | None  # the same for each key row, `n * L` per call
    answers: GatherIndex | None  # the query row, counted over all calls, with the output of each of the `T` tokens

    @staticmethod
    @once_per_layout
    def of(layout: FlatLayout, pads: bool = True) -> "AttentionCalls":
        """The calls of a layout. Unless it `pads`, all segments of a call have one shape."""
        segments = layout.segments
        shapes = [*zip(segments.lengths, segments.key_lengths, strict=True)]
        if layout.blocks is not None:  # each segment has a mask of its own
            calls = [[i] for i in range(len(shapes))]
        else:  # adjacent ones of equal shape, or any of similar shape if that saves enough calls
            calls = [list(run) for _, run in groupby(range(len(shapes)), shapes.__getitem__)]
            grouped = segments_of_like_shape(segments.lengths, segments.key_lengths, PADDED_SHARE * pads)
            calls = grouped if len(grouped) + _CALLS_OF_AN_ORDER < len(calls) else calls
        lengths, key_lengths = np.array(shapes).T
        queries, keys = ([int(sizes[call].max()) for call in calls] for sizes in (lengths, key_lengths))

        order, numbers = np.concatenate(calls), list(map(len, calls))
        query_slots, key_slots = np.repeat(queries, numbers), np.repeat(keys, numbers)
        is_ordered = (order[1:] > order[:-1]).all()
        query_rows, key_rows, answers = None, layout.kv_gather, None
        if not is_ordered or (query_slots != lengths).any():
            index = _runs(np.array(segments.offsets)[order], lengths[order], query_slots)
            query_rows = layout.gather_index(index, segments.num_tokens)
            firsts = np.cumsum(query_slots) - query_slots
            answers = layout.gather_index(_runs(firsts[np.argsort(order)], lengths, lengths), len(index))
        if not is_ordered or (key_slots != key_lengths).any():
            index = _runs(segments.cu_seqlens_k[order], key_lengths[order], key_slots)
            kv_index = segments.kv_index
            key_rows = layout.gather_index(index if kv_index is None else kv_index[index], segments.num_keys)
        return AttentionCalls(tuple(map(tuple, calls)), tuple(queries), tuple(keys), query_rows, key_rows, answers)


def _runs(firsts: np.ndarray, lengths: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """For each `i`, `lengths[i]` numbers that count from `firsts[i]`, the last one repeated to fill `slots[i]`."""
    within = np.arange(slots.sum()) - np.repeat(np.cumsum(slots) - slots, slots)
    return np.repeat(firsts, slots) + np.minimum(within, np.repeat(lengths - 1, slots))


def segments_of_like_shape(
    lengths: Sequence[int], key_lengths: Sequence[int], share: int = PADDED_SHARE
) -> list[list[int]]:
    """
    Group segments, given their queries and keys, where padding costs less than separate calls. It is at most a `share`
    of a segment's own pairs.

    Branches (segments that continue others) need a mask and roots do not, so the two are never grouped together.

    >>> segments_of_like_shape([30, 400, 29, 5, 400], [30, 400, 29, 33, 400])
    [[1, 4], [0, 2], [3]]
    """
    is_branch = [keys > length for length, keys in zip(lengths, key_lengths, strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: (is_branch[i], -key_lengths[i], -lengths[i]))
    groups: list[list[int]] = []
    queries = keys = 0
    for i in order:
        if groups and is_branch[groups[-1][0]] == is_branch[i]:  # its first segment has the most keys: `keys`
            longest = max(queries, lengths[i])
            padding = (longest - queries) * keys * len(groups[-1]) + longest * keys - lengths[i] * key_lengths[i]
            if padding <= min(PAIRS_OF_A_CALL, share * lengths[i] * key_lengths[i]):
                groups[-1].append(i)
                queries = longest
                continue
        groups.append([i])
        queries, keys = lengths[i], key_lengths[i]
    return groups
