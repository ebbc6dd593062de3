"""How a pass computes a flat batch."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Schedule:
    """
    How a pass computes a flat batch. By default, without a budget: whole, with layers as TRL has set them.

    Args:
        cuts (`tuple[int, ...]`, *optional*):
            Flat positions at which the axis is cut into slices, including 0 and `T`. If empty, it is computed whole.
        recompute (`int`, *optional*):
            How many layers, from the first on, recompute their activations in the backward pass. `None`: as TRL set it.
        head_chunk (`int`, *optional*):
            The most scored tokens that the LM head computes at a time. `None`: all of them.
        peak (`int`, *optional*, defaults to `0`):
            Predicted bytes at the peak of the pass; 0 without `memory_budget`.
        kept_slices (`int`, *optional*, defaults to `1`):
            How many of the last slices keep their activations for the backward pass; those before them recompute.

    >>> Schedule().num_slices, Schedule(cuts=(0, 4, 9)).num_slices
    (1, 2)
    """

    cuts: tuple[int, ...] = ()
    recompute: int | None = None
    head_chunk: int | None = None
    peak: int = 0
    kept_slices: int = 1

    @property
    def num_slices(self) -> int:
        """Number of slices; a batch that is computed whole is one."""
        return max(len(self.cuts) - 1, 1)

    def largest_slice(self, num_tokens: int) -> int:
        """Tokens of the largest slice of a batch of `num_tokens`."""
        return max((stop - start for start, stop in pairwise(self.cuts)), default=num_tokens)
