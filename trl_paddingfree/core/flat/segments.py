"""How a flat axis of tokens is cut into segments, and which segment each one continues: the tree of its rows.

Shape legend, here and in the modules that use it:
    T = flat tokens, N = segments, S = key/value rows (T when nothing is shared),
    R = rows (sequences), L = longest row

Two pairs, each with a prompt of three tokens, as two segments `[prompt chosen]` and two segments `[rejected]`:

    flat    0  1  2  3  4  5 | 6  7  8  9 | 10 11 12 | 13 14 15     lengths (6, 4, 3, 3)
            prompt   chosen    prompt   ch.   rejected   rejected     parents (-1, -1, 0, 1)
    pos     0  1  2  3  4  5   0  1  2  3    2  3  4    2  3  4      starts  (0, 0, 2, 2)

Segment 2 continues the first two tokens of segment 0 and recomputes the third: the last prompt token predicts a
different token in each branch, so each branch owns a copy of it and every flat token has a single next token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from operator import add

import numpy as np

Ints = tuple[int, ...]

# Gathering this many keys, with their values and gradients, counts as computing one token. On an H100, it took 5 of the
# 654 ms of a step (docs/gpu.md), about 190 keys for a token; on narrow models with many key heads, it may be a third
KEYS_OF_A_TOKEN = 64


@dataclass(frozen=True)
class Segments:
    """
    `T` flat tokens cut into `N` segments. The queries of each attend causally to the keys of its path: those that it
    inherits from its ancestors, and its own.

    Three tuples of ints on the host define it. Everything else is derived from them on the CPU.

    Args:
        lengths (`tuple[int, ...]`):
            Number of tokens of each segment, at least 1. They sum to `T`.
        parents (`tuple[int, ...]`):
            Index of the segment that each segment continues, always an earlier one, or -1 for a root.
        starts (`tuple[int, ...]`):
            Position of the segment's first token in its row, which is the number of tokens it inherits from its
            parent's path; 0 for a root.

    Raises:
        `ValueError`: If a segment is empty, continues a later segment, or starts beyond the end of its parent.

    >>> from trl_paddingfree import Segments
    >>> segments = Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 2))
    >>> segments.position_ids.tolist()
    [0, 1, 2, 3, 4, 5, 2, 3, 4]
    >>> segments.path(1).tolist()  # the flat positions of the row that ends in segment 1
    [0, 1, 6, 7, 8]
    >>> segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist()
    ([0, 6, 9], [0, 6, 11])
    """

    lengths: Ints
    parents: Ints
    starts: Ints

    def __post_init__(self):
        for i, (length, parent, start) in enumerate(zip(self.lengths, self.parents, self.starts, strict=True)):
            if length < 1:
                raise ValueError(f"Segment {i} has length {length}: leave empty segments out (varlen kernels hang).")
            if not -1 <= parent < i:
                raise ValueError(f"Segment {i} has parent {parent}: it must be -1 or an earlier segment.")
            end = 0 if parent == -1 else self.starts[parent] + self.lengths[parent]
            if not (start == 0 if parent == -1 else 0 < start <= end):
                raise ValueError(f"Segment {i} starts at {start}, outside its parent {parent}, which ends at {end}.")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "Segments":
        """Segments that share nothing: one root per length."""
        return cls((), (), ()).with_roots(lengths)

    def with_roots(self, lengths: Sequence[int]) -> "Segments":
        """These segments, followed by others that share nothing."""
        number = len(lengths)
        return Segments((*self.lengths, *lengths), (*self.parents, *[-1] * number), (*self.starts, *[0] * number))

    def __getstate__(self) -> dict:
        # Data loader workers send only the fields: the rest is cheap to derive again
        return {each.name: vars(self)[each.name] for each in fields(self)}

    @cached_property
    def num_tokens(self) -> int:
        """`T`, the tokens to compute."""
        return sum(self.lengths)

    @property
    def num_keys(self) -> int:
        """Tokens whose keys and values may be read: all of them and, in a slice, those that earlier slices keep."""
        return self.num_tokens

    @cached_property
    def is_shared(self) -> bool:
        """Whether any segment continues another one."""
        return any(self.starts)

    @cached_property
    def offsets(self) -> Ints:
        """`(N+1,)` ints: flat position where each segment starts, and `T`."""
        return (0, *np.cumsum(self.lengths, dtype=np.int64).tolist())

    @cached_property
    def key_lengths(self) -> Ints:
        """`(N,)` ints: number of keys each segment's last query attends to (inherited and own)."""
        return tuple(map(add, self.starts, self.lengths))

    @property
    def cu_seqlens_q(self) -> np.ndarray:
        """`(N+1,)` int32: boundaries of the queries of each segment."""
        return np.array(self.offsets, np.int32)

    @property
    def cu_seqlens_k(self) -> np.ndarray:
        """`(N+1,)` int32: boundaries of the keys that each segment reads."""
        return np.append(0, np.cumsum(self.key_lengths)).astype(np.int32)

    @cached_property
    def max_seqlen_q(self) -> int:
        """Most queries of a segment."""
        return max(self.lengths)

    @cached_property
    def max_seqlen_k(self) -> int:
        """Most keys of a segment."""
        return max(self.key_lengths)

    @property
    def position_ids(self) -> np.ndarray:
        """`(T,)` int64: position of each token in its own row, from 0."""
        return np.concatenate([*map(np.arange, self.starts, self.key_lengths)])

    @cached_property
    def _paths(self) -> tuple[np.ndarray, ...]:
        paths: list[np.ndarray] = []
        for parent, start, ends in zip(self.parents, self.starts, pairwise(self.offsets), strict=True):
            own = np.arange(*ends)
            paths.append(own if parent == -1 else np.append(paths[parent][:start], own))
        return tuple(paths)

    def path(self, segment: int) -> np.ndarray:
        """`(starts[segment] + lengths[segment],)` int64: flat positions of the row that ends with `segment`."""
        return self._paths[segment]

    @cached_property
    def entered(self) -> np.ndarray:
        """`(N,)` int64: the flat token that precedes the first one of each segment in its row; -1 for roots."""
        paths = zip(self._paths, self.starts, strict=True)
        return np.array([path[start - 1] if start else -1 for path, start in paths])

    @cached_property
    def kv_index(self) -> np.ndarray | None:
        """`(S,)` int64: flat position of every key/value row, segment by segment; `None` if each key is read once."""
        index = np.concatenate(self._paths)
        return None if np.array_equal(index, np.arange(self.num_keys)) else index

    def last_readers(self, window: int) -> np.ndarray:
        """`(T,)` int64: flat position of the last token that reads each key, within a `window` of positions."""
        if window not in (cache := vars(self).setdefault("_last_readers", {})):
            cache[window] = last = np.zeros(self.num_tokens, np.int64)
            for path, start, end in zip(self._paths, self.starts, self.offsets[1:], strict=True):  # in flat order
                readers = np.minimum(np.arange(len(path)) + window, len(path)) - 1  # by their place in the row
                reads = readers >= start
                last[path[reads]] = end - len(path) + readers[reads]
        return cache[window]

    def dense_mask(self) -> np.ndarray:
        """`(T, T)` bool: whether query `i` attends to key `j`, by the definition of a path. The reference for tests."""
        mask = np.zeros((self.num_tokens, self.num_tokens), bool)
        for path, start, length in zip(self._paths, self.starts, self.lengths, strict=True):
            mask[np.ix_(path[start:], path)] = np.tri(length, len(path), start, dtype=bool)
        return mask


@dataclass(frozen=True)
class PartialSegments(Segments):
    """
    Parts of segments, with the keys that each reads: those of a slice, or of chunks. `_paths` are indices into the axis
    of these keys, and `starts` counts the keys that each part reads before its own. `parents` is empty.
    """

    _paths: tuple[np.ndarray, ...] = field(default=(), compare=False)  # type: ignore[assignment]
    num_keys: int = 0  # type: ignore[assignment]

    def __post_init__(self):
        """Nothing to validate: parts continue keys, not segments."""

    @classmethod
    def of(cls, lengths: Sequence[int], paths: Sequence[np.ndarray], num_keys: int) -> "PartialSegments":
        """Parts of these lengths, each at the end of its path along an axis of `num_keys`."""
        starts = (len(path) - length for path, length in zip(paths, lengths, strict=True))
        return cls(tuple(lengths), (), tuple(starts), tuple(paths), num_keys)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix of two rows."""
    n = min(len(one), len(other))
    return int(np.append(one[:n] != other[:n], True).argmax())


def something_to_compute(start: int, stop: int, total: int) -> range:
    """
    The flat tokens from `start` up to `stop`. For an empty slice, the first two of `total` stand in and do not count:
    models need something to compute, and take a single token for a decoding step.
    """
    return range(start, stop) if start < stop else range(min(2, total))


def adjacent_prefixes(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Indices of int64 rows in sorted order, and the length of the prefix that each shares with the one before it."""
    # Byte order is not the order of the ids, but it keeps rows with a common prefix together
    keys = [np.ascontiguousarray(row).tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return order, [0, *(common_prefix(rows[before], rows[after]) for before, after in pairwise(order))]


def num_distinct_tokens(rows: Sequence[np.ndarray]) -> int:
    """Nodes of the tree that the rows form by their tokens: the fewest tokens any method can compute."""
    return sum(len(row) for row in rows) - sum(adjacent_prefixes(rows)[1])


def share_prefixes(rows: Sequence[np.ndarray], alone: Sequence[np.ndarray] = ()) -> tuple[Segments, Ints, np.ndarray]:
    """
    Lay rows out on one flat axis, with shared prefixes stored once.

    Each row continues the earlier one with which it shares the longest prefix, if that pays off: the tokens that it
    inherits need not be computed, but once any row continues another, every layer gathers every key of the batch. Two
    thresholds decide: a row must inherit at least one in `KEYS_OF_A_TOKEN` of its tokens, and the batch must save at
    least one token for every `KEYS_OF_A_TOKEN` keys that it gathers. A row that is a prefix of another one is free.

    Args:
        rows (`Sequence[np.ndarray]`):
            The tokens of each row, int64; no row is empty.
        alone (`Sequence[np.ndarray]`, *optional*):
            Rows that share nothing, laid out after these.

    Returns:
        `tuple[Segments, tuple[int, ...], np.ndarray]`: The segments, the segment in which each row ends, and the `(T,)`
        int64 flat tokens.

    >>> share_prefixes([np.array([1, 2, 3, 4]), np.array([1, 2, 5])])
    (Segments(lengths=(4, 2), parents=(-1, 0), starts=(0, 1)), (0, 1), array([1, 2, 3, 4, 2, 5]))
    """
    neighbours, others = adjacent_prefixes(rows), list(map(len, alone))
    segments, ends, tokens = _lay_out(rows, *neighbours, KEYS_OF_A_TOKEN)
    if 0 < sum(segments.starts) * KEYS_OF_A_TOKEN < sum(segments.key_lengths) + sum(others):
        segments, ends, tokens = _lay_out(rows, *neighbours, 0)
    ends += range(len(segments.lengths), len(segments.lengths) + len(others))
    return segments.with_roots(others), tuple(ends), np.concatenate([np.zeros(0, np.int64), *tokens, *alone])


def _lay_out(
    rows: Sequence[np.ndarray], order: list[int], prefixes: list[int], keys_of_a_token: int
) -> tuple[Segments, list[int], list[np.ndarray]]:
    """
    Lay out `rows` for [`share_prefixes`], given their [`adjacent_prefixes`]. In sorted order, two rows share the
    minimum of what the adjacent pairs between them share, so that the only work on tokens is one sort of byte strings
    and one comparison per adjacent pair. With `keys_of_a_token=0`, no segment continues another one.
    """
    ranks: list[int] = []  # of the rows so far, sorted
    row_segments: list[int] = []
    parents: list[int] = []
    starts: list[int] = []
    tokens: list[np.ndarray] = []  # of each segment

    def ancestor(segment, depth):
        """The segment on the path of `segment` that holds token `depth - 1` of the row."""
        while starts[segment] >= depth:
            segment = parents[segment]
        return segment

    for row, rank in zip(rows, np.argsort(order).tolist(), strict=True):
        at = bisect_left(ranks, rank)  # of the earlier rows, its neighbours in sorted order share most with it
        near = ranks[max(at - 1, 0) : at + 1]
        ranks.insert(at, rank)
        common = [(min(prefixes[min(i, rank) + 1 : max(i, rank) + 1]), order[i]) for i in near]
        shared, other = max(common, default=(0, -1))
        segment = row_segments[other] if shared else -1
        if shared == len(row):
            row_segments.append(ancestor(segment, shared))
        elif shared and shared == len(rows[other]) == starts[segment] + len(tokens[segment]):
            # The other row is a prefix that nothing continues yet: extend its segment
            row_segments.append(segment)
            tokens[segment] = np.append(tokens[segment], row[shared:])
        else:
            start = max(shared - 1, 0)  # the last common token predicts another token here: this branch owns a copy
            start = start if start * keys_of_a_token >= len(row) else 0
            row_segments.append(len(tokens))
            tokens.append(row[start:])
            parents.append(ancestor(segment, start) if start else -1)
            starts.append(start)
    return Segments(tuple(map(len, tokens)), tuple(parents), tuple(starts)), row_segments, tokens
