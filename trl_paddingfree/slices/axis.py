"""Slices of a flat axis, computed one after another: each reads keys and values of earlier ones on its paths.

Tokens depend only on earlier ones, so the axis can be computed in order and cut anywhere.
Shape legend: see [`~trl_paddingfree.core.flat.segments`]. Two rows that share three tokens, in two slices:

    flat    0  1  2  3 | 4  5  6  7     lengths (6, 3), parents (-1, 0), starts (0, 2)
    slice   0  0  0  0   1  1  1  1     the second has two runs: tokens 4 and 5 of segment 0, and all of segment 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.flat.layout import FlatLayout, once_per_layout
from ..core.flat.segments import Ints, PartialSegments, Segments
from ..core.flat.transfer import HasTensors
from ..spans import NO_WINDOW, handed_on, out_of_block

# A cut moves to the end of a segment within an eighth of a slice: runs that begin there need no mask
_NEAR = 8


@dataclass(frozen=True)
class Slice(HasTensors):
    """
    Contiguous tokens of a flat axis. In an empty slice, two tokens stand in and do not count, see
    [`something_to_compute`].

    >>> layout = FlatLayout.from_segments(Segments(lengths=(6, 3), parents=(-1, 0), starts=(0, 3)))
    >>> one, two = slices_of(layout, (0, 4, 9))
    >>> one.keeps, two.reads, two.layout.kv_index.tolist()  # of four keys of the first, its second run reads three
    (None, (0,), [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8])
    """

    span: range
    layout: FlatLayout
    reads: Ints  # the earlier slices whose kept keys come before its own
    keeps: torch.Tensor | None  # (K,) int64: those of its tokens whose keys later slices read; `None`: all of them


@once_per_layout
def slices_of(layout: FlatLayout, cuts: Ints, with_reach: bool = False, window: int = NO_WINDOW) -> tuple[Slice, ...]:
    """
    The slices of a layout between `cuts`, flat positions that include 0 and `T`. `with_reach`, each has one extra token
    in a row of its own, for the last position of the longest row, so that rotary frequencies agree in all slices.
    `window` is the number of positions that attention sees, a token's own included: slices hold no other keys.
    """
    blocks, slices = layout.host_blocks, []
    handed = handed_on(layout, cuts, window - 1)
    for view, inherited, kept in handed:
        reads = tuple(np.unique(np.searchsorted(cuts, inherited, "right") - 1).tolist())
        # The keys that earlier slices kept, then its own
        axis = np.concatenate([*(handed[i][-1] for i in reads), np.asarray(view.span)])
        lengths = [run.length for run in view.runs]
        paths = [np.searchsorted(axis, run.reads(window - 1)) for run in view.runs]
        if with_reach:
            lengths, paths = [*lengths, 1], [*paths, np.array([len(axis)])]
        own = PartialSegments.of(lengths, paths, len(axis) + with_reach)
        keeps = None if len(kept) == own.num_tokens else torch.from_numpy(kept - view.span.start)
        made = FlatLayout.from_segments(own, None if blocks is None else np.append(blocks[axis], [-1] * with_reach))
        slices.append(Slice(view.span, made, reads, keeps))
    return tuple(each.to(layout.device, non_blocking=True) for each in slices)


def kept_keys(segments: Segments, cuts: Sequence[int], windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Counts for each window: `(windows,)` int64, tokens whose keys and values stay until later slices have read them;
    and `(windows, slices)` int64, tokens before each slice whose keys it or later ones read.

    >>> kept_keys(Segments((6, 3), (-1, 0), (0, 3)), (0, 2, 4, 9), np.array([9, 2]))
    (array([4, 3]), array([[0, 2, 4],
           [0, 1, 2]]))
    """
    begin, end = np.zeros((2, len(windows), len(cuts) + 1), np.int64)
    own = np.searchsorted(cuts, np.arange(cuts[-1]), "right")
    for i, window in enumerate(windows.tolist()):
        later = np.searchsorted(cuts, segments.last_readers(window), "right")
        for counts, slices in ((begin, own), (end, later)):
            counts[i] = np.bincount(slices[later > own] + 1, minlength=len(cuts) + 1)
    return begin.sum(1), np.cumsum(begin - end, 1)[:, 1 : len(cuts)]


def cut_by_size(segments: Segments, size: int, blocks: np.ndarray | None = None) -> Ints:
    """
    Where to cut so that slices have at most `size` tokens (more if an image block has more), and the last, which is not
    recomputed, about as many. Cuts lie at the end of a segment if one is near, and never within an image block. No
    slice of text has a single token: models without attention take that for a decoding step, and drop its mask.

    >>> cut_by_size(Segments.from_lengths([50, 53, 7]), 40)
    (0, 30, 70, 110)
    """
    cuts, ends, size = [segments.num_tokens], np.array(segments.offsets), max(size, 2)
    while cuts[0] > max(size, 3):
        cut = max(cuts[0] - size, 2)
        near = ends[(cut < ends) & (ends <= min(cuts[0] - size + size // _NEAR, cuts[0] - 2))]
        cut = int(near[0]) if len(near) else cut
        after = out_of_block(cut, blocks, 1)
        cuts.insert(0, after if after < cuts[0] - 1 else out_of_block(cut, blocks, -1))
    return (0, *cuts) if cuts[0] else tuple(cuts)


def sizes_to_try(segments: Segments, largest: int, least: int) -> list[int]:
    """
    Slice sizes in tokens, from the `largest` down to the `least`, one of which needs about the least memory. Smaller is
    not always better: keys of completions that are cut must stay, and slices that fit whole completions cut none.

    >>> sizes_to_try(Segments((3000, 700, 800), (-1, 0, 0), (0, 3000, 3000)), 1000, 128)
    [1000, 914, 500, 250, 128]
    """
    longest = max(length for i, length in enumerate(segments.lengths) if i not in segments.parents)
    sizes = {largest >> halvings for halvings in range(largest.bit_length())} | {longest * 8 // 7}
    least = min(least, largest)
    return sorted({size for size in sizes if least < size <= largest} | {least}, reverse=True)
