"""How a micro-batch is split into parts that fit into a budget of tokens, and what fits into one of memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# Where the search for the most tokens that fit ends: no device has so much memory
MOST_TOKENS = 2**30
# How many tensors TRL's activation offloading leaves on the device while they are copied to the host
STASHED = 5


def split_by_tokens(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """
    Split a micro-batch into as few parts as first-fit finds, none of more than `limit` tokens.

    An item above the limit gets a part of its own.

    Args:
        tokens (`Sequence[int]`):
            Tokens to compute of each item.
        limit (`int`):
            Most tokens of one part.

    Returns:
        `list[list[int]]`: Items of each part, in their original order.

    Examples:
    ```python
    >>> from trl_paddingfree.batching.budget import split_by_tokens
    >>> split_by_tokens([30, 50, 20, 60], limit=80)
    [[2, 3], [0, 1]]

    ```
    """
    parts: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        part = next((p for p, free in enumerate(room) if free >= tokens[item]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(limit)
        parts[part].append(item)
        room[part] -= tokens[item]
    return [sorted(part) for part in parts]


@dataclass(frozen=True)
class MemoryNeeds:
    """
    How many bytes a micro-batch needs at its peak: the one place where this arithmetic is.

    The peak is one of two moments. When the backward pass begins, every layer holds what it keeps, and the LM head or
    the last layer works. When the last of the recomputing layers has recomputed, it holds all that it computed, and
    the layers before it their inputs; what the layers after it kept is free by then.

    Args:
        fixed (`int`):
            Bytes that do not depend on the micro-batch: weights, gradients, state of the optimizer.
        kept (`ArrayLike` of shape `(layers, loads)`):
            For each layer, the bytes that it keeps per unit of each load, if it does not recompute.
        recomputed (`ArrayLike`):
            The same, if it does.
        outside (`ArrayLike` of shape `(loads,)`):
            The same, of what lies outside of the layers.
        head (`ArrayLike`, same shape):
            The same, of what the LM head works with for a time.
        tile (`tuple[int, int]`):
            Bytes per row of the logits that the LM head has at a time, and the most rows; a row for each unit of the
            last load.
        working (`ArrayLike`, same shape):
            The same, of what the backward pass of one layer works with for a time.
        correction (`float`, *optional*, defaults to `1.0`):
            By what all but `fixed` is multiplied: what was measured over what was predicted.

    Examples:
    ```python
    >>> import numpy as np
    >>> from trl_paddingfree.batching.budget import MemoryNeeds
    >>> layers = 4  # each keeps 10 bytes per token, or its input of 2
    >>> needs = MemoryNeeds(100, [[10]] * layers, [[2]] * layers, [1], [3], (1, 2), [4])
    >>> needs.peaks(np.array([5])).tolist()
    [325, 285, 245, 205, 215]
    >>> needs.num_recomputed(np.array([5]), 250), needs.num_recomputed(np.array([5]), 1000)
    (2, 0)
    >>> needs.offloaded(np.array([5]))
    (225, 45)

    ```
    """

    fixed: int
    kept: ArrayLike
    recomputed: ArrayLike
    outside: ArrayLike
    head: ArrayLike
    tile: tuple[int, int]
    working: ArrayLike
    correction: float = 1.0

    def saved(self, load: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes kept between the forward and the backward pass, if the first `n` recompute."""
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        before, after = np.cumsum([0, *recomputed]), np.cumsum([0, *kept[::-1]])[::-1]
        return np.rint(self.correction * (before + after + np.dot(self.outside, load))).astype(np.int64)

    def _head(self, load: np.ndarray) -> float:
        """Bytes that the LM head works with for a time."""
        return np.dot(self.head, load) + self.tile[0] * min(load[-1], self.tile[1])

    def peaks(self, load: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes at the peak of a micro-batch, if the first `n` layers recompute."""
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        working, outside = np.dot(self.working, load), np.dot(self.outside, load)
        begin = self.saved(load) + self.correction * max(self._head(load), working)
        redone = self.correction * (np.cumsum(recomputed) + np.maximum.accumulate(kept) + working + outside)
        return self.fixed + np.rint(np.maximum(begin, [0, *redone])).astype(np.int64)

    def offloaded(self, load: np.ndarray) -> tuple[int, int]:
        """
        Bytes at the peak, and bytes on the host, if every layer recomputes and its input waits on the host.

        What is kept outside of the layers is moved, too, but counts at the peak: it is used right after the last layer.
        """
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        working, outside = np.dot(self.working, load), np.dot(self.outside, load)
        on_device = outside + STASHED * recomputed.max() + max(self._head(load), kept.max() + working)
        host = self.correction * (recomputed.sum() + outside)
        return self.fixed + round(self.correction * on_device), round(host)

    def num_recomputed(self, load: np.ndarray, budget: int) -> int:
        """The fewest layers that must recompute for a micro-batch to fit; if it never does, those that need least."""
        peaks = self.peaks(load)
        return int((peaks <= budget).argmax() if peaks.min() <= budget else peaks.argmin())

    def most_tokens(self, load_of: Callable[[int], np.ndarray], budget: int) -> int:
        """The most tokens that fit, 0 if none do; `load_of` gives the load of so many tokens."""
        low, high = 0, 1
        while high < MOST_TOKENS and self.peaks(load_of(high)).min() <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peaks(load_of(middle)).min() <= budget else (low, middle)
        return low
