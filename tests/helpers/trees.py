"""Random trees of segments."""

import numpy as np

from trl_paddingfree import Segments

# Single tokens, lengths below and above the reach of convolutions, and beyond a chunk of recurrences
LENGTHS = (1, 1, 2, 3, 4, 7, 20, 70)


def random_segments(seed: int, depth: int = 5) -> Segments:
    """Segments of which chains of up to `depth` continue one another, from their first tokens on or from their last."""
    rng = np.random.default_rng(seed)
    lengths, parents, starts, depths = [], [], [], []
    for i in range(int(rng.integers(2, 9))):
        parent = int(rng.choice([-1, *(j for j in range(i) if depths[j] < depth)]))
        end = 0 if parent == -1 else starts[parent] + lengths[parent]
        starts.append(0 if parent == -1 else int(rng.choice([1, end, rng.integers(1, end + 1)])))
        lengths.append(int(rng.choice(LENGTHS)))
        parents.append(parent)
        depths.append(1 if parent == -1 else depths[parent] + 1)
    return Segments(tuple(lengths), tuple(parents), tuple(starts))
