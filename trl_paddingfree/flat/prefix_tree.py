"""Rows to segments: find the prefixes that rows share, so that each is computed once.

Sorting the rows makes the longest common prefix of any two rows the minimum over their neighbours in between, so all
token-level work is one sort of byte strings and one comparison per adjacent pair. What remains is a loop over rows.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from .segments import Segments


def adjacent_prefixes(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Indices of rows of int64 tokens in sorted order, and how many first tokens each shares with the one before it."""
    # The order of the bytes is not the order of the ids, but it keeps rows with a common prefix together
    keys = [np.ascontiguousarray(row).tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    prefixes = [0]
    for before, after in zip(order, order[1:], strict=False):
        n = min(len(rows[before]), len(rows[after]))
        prefixes.append(int(np.append(rows[before][:n] != rows[after][:n], True).argmax()))
    return order, prefixes


def num_distinct_tokens(rows: Sequence[np.ndarray]) -> int:
    """Nodes of the tree that the rows form by their tokens: the fewest tokens any method can compute."""
    return sum(len(row) for row in rows) - sum(adjacent_prefixes(rows)[1])


class _Tree:
    """Segments under construction: rows are added one by one, each next to the added row that it resembles most."""

    def __init__(self):
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.starts: list[int] = []
        self.pieces: list[list[tuple[int, int, int]]] = []  # per segment: (row, first token, end) of what it holds

    def ancestor(self, segment: int, depth: int) -> int:
        """The segment on the path of `segment` that holds token `depth - 1` of the row."""
        while self.starts[segment] >= depth:
            segment = self.parents[segment]
        return segment

    def add(self, row: int, length: int, neighbour: tuple[int, int, int] | None) -> int:
        """Add a row of `length` tokens beside `neighbour`, a tuple (shared tokens, its segment, its length)."""
        shared, segment, neighbour_length = neighbour or (0, -1, 0)
        if neighbour and shared == length:
            return self.ancestor(segment, length)
        if neighbour and shared == neighbour_length == self.starts[segment] + self.lengths[segment]:
            # The neighbour is a prefix that nothing continues yet: its segment simply goes on
            self.pieces[segment].append((row, shared, length))
            self.lengths[segment] += length - shared
            return segment
        start = max(shared - 1, 0)  # the last common token predicts another token here: this branch owns a copy
        self.parents.append(self.ancestor(segment, start) if start else -1)
        self.starts.append(start)
        self.lengths.append(length - start)
        self.pieces.append([(row, start, length)])
        return len(self.lengths) - 1


def share_prefixes(rows: Sequence[np.ndarray]) -> tuple[Segments, tuple[int, ...], np.ndarray]:
    """
    Non-empty rows of int64 tokens with every prefix that several of them share there once: the segments, the segment
    that each row ends in, and the `(T,)` int64 flat tokens.

    >>> share_prefixes([np.array([1, 2, 3, 4]), np.array([1, 2, 5])])
    (Segments(lengths=(4, 2), parents=(-1, 0), starts=(0, 1)), (0, 1), array([1, 2, 3, 4, 2, 5]))
    """
    order, prefixes = adjacent_prefixes(rows)
    rank_of = {row: rank for rank, row in enumerate(order)}
    tree = _Tree()
    placed: list[int] = []  # ranks of the rows already in the tree, sorted
    row_segments: list[int] = []
    for row, tokens in enumerate(rows):
        rank = rank_of[row]
        at = bisect_left(placed, rank)
        before = [(min(prefixes[i + 1 : rank + 1]), order[i]) for i in placed[max(at - 1, 0) : at]]
        after = [(min(prefixes[rank + 1 : i + 1]), order[i]) for i in placed[at : at + 1]]
        shared, other = max(before + after, default=(0, -1))
        neighbour = (shared, row_segments[other], len(rows[other])) if shared else None
        row_segments.append(tree.add(row, len(tokens), neighbour))
        insort(placed, rank)
    flat = np.concatenate([rows[row][first:end] for pieces in tree.pieces for row, first, end in pieces])
    return Segments(tuple(tree.lengths), tuple(tree.parents), tuple(tree.starts)), tuple(row_segments), flat
