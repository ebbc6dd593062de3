"""The features of a batch from which its memory is predicted: a few sizes that the host knows."""

from collections.abc import Sequence

import numpy as np

from ..core.flat.batch import FlatBatch
from ..core.flat.segments import Segments
from ..core.model.backends import ATTENTION_BACKENDS
from ..core.model.routes import Route

# 1; tokens; keys of all segments; query-key pairs whose scores or masks attention keeps; numbers in the pixels of
# images; scored tokens; with SDPA, all query-key pairs, as some devices have no kernel that keeps no scores
FEATURES = ("constant", "tokens", "keys", "pairs", "pixels", "scored", "all_pairs")
CONSTANT, TOKENS, KEYS, PAIRS, PIXELS, SCORED, ALL_PAIRS = range(len(FEATURES))


def memory_features(batch: FlatBatch, route: Route, scored: int | None = None) -> np.ndarray:
    """
    `(len(FEATURES),)` int64: the features of a flat batch computed by `route`. `scored` is the number of scored tokens
    that this process computes, by default all.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> features = memory_features(batch, Route("segment", "sdpa", True))
    >>> dict(zip(FEATURES, features.tolist()))
    {'constant': 1, 'tokens': 6, 'keys': 7, 'pairs': 6, 'pixels': 0, 'scored': 3, 'all_pairs': 22}
    """
    tokens = batch.layout.segments.num_tokens
    features = slice_features(batch.layout.segments, (0, tokens), route)[0]
    if route.backend not in ATTENTION_BACKENDS:
        features[[KEYS, PAIRS, ALL_PAIRS]] = tokens, tokens**2, 0
    features[PIXELS] = sum(hook.numbers for hook in batch.hooks)
    features[SCORED] = len(batch.scored) if scored is None else scored
    return features


def joined_features(one: np.ndarray, other: np.ndarray, route: Route) -> np.ndarray:
    """The features of a batch that joins the rows of two others, which share nothing."""
    both = one + other
    both[CONSTANT] = 1
    if route.backend not in ATTENTION_BACKENDS:
        both[PAIRS] = both[TOKENS] ** 2
    return both


def slice_features(segments: Segments, cuts: Sequence[int], route: Route) -> np.ndarray:
    """
    `(slices, len(FEATURES))` int64: the features of the decoder in each slice of a batch between `cuts`, flat positions
    that include 0 and `T`.

    >>> slices = slice_features(Segments((6, 3), (-1, 0), (0, 3)), (0, 4, 9), Route("flash", "flash_attention_2", True))
    >>> slices[:, :PAIRS].tolist()
    [[1, 4, 4], [1, 5, 12]]
    """
    offsets = np.array(segments.offsets)
    bounds = np.union1d(offsets, cuts)
    firsts, lengths = bounds[:-1], np.diff(bounds)
    of_run = np.searchsorted(offsets, firsts, "right") - 1  # the segment of each run of a slice
    keys = np.array(segments.starts)[of_run] + firsts - offsets[of_run] + lengths
    pairs, of_sdpa = lengths * keys, np.zeros_like(keys)
    if route.loaded_with == "sdpa":  # keeps no scores, and a mask only where a segment or slice continues others
        pairs, of_sdpa = pairs * (keys > lengths), pairs
    slices = np.zeros((len(cuts) - 1, len(FEATURES)), np.int64)
    slices[:, CONSTANT] = 1
    sums = np.add.reduceat([lengths, keys, pairs, of_sdpa], np.searchsorted(firsts, cuts[:-1]), 1).T
    slices[:, [TOKENS, KEYS, PAIRS, ALL_PAIRS]] = sums
    return slices
