"""How many tokens a batch computes, here and with other methods, counted on the host."""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class BatchCounts:
    """
    Host counts of one batch, from which every figure about waste is derived.

    Args:
        computed, real, padded (`int`):
            Tokens that the model computes, `T`; tokens of all rows; slots of the padded batch, `R * L`.
        distinct (`int`):
            Nodes of the tree that the rows form: the fewest tokens any method can compute.
        repeated (`int`):
            Extra tokens of layers that need whole rows (RWKV, xLSTM): they compute a shared prefix again for every
            segment that continues it.

    >>> from trl_paddingfree import BatchCounts, FlatBatch
    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> batch.counts
    BatchCounts(computed=6, real=7, padded=8, distinct=5, repeated=1)
    >>> batch.counts + BatchCounts(computed=2, real=2, padded=2, distinct=2)
    BatchCounts(computed=8, real=9, padded=10, distinct=7, repeated=1)
    """

    computed: int = 0
    real: int = 0
    padded: int = 0
    distinct: int = 0
    repeated: int = 0

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*map(add, self.as_tuple(), other.as_tuple()))

    as_tuple = astuple  # the counts, in the order above


# What is counted of a dataset: the number of rows that TRL keeps; lengths before truncation, `(rows, sequences)`; and
# a function that counts a batch of kept rows, given their indices
Counted = tuple[int, np.ndarray, Callable[[np.ndarray], BatchCounts]]


class TokenCounts:
    """The [`BatchCounts`] of this process in a run: up to the last log, and since."""

    def __init__(self) -> None:
        self.logged, self.logged_at = BatchCounts(), time.perf_counter()
        self.new: list[BatchCounts] = []  # of each micro-batch since the last log

    @property
    def total(self) -> BatchCounts:
        """What this process has computed so far."""
        return sum(self.new, self.logged)

    def restart(self) -> None:
        """Begin to log anew: what an earlier run computed after its last log counts among the totals only."""
        self.logged, self.new, self.logged_at = self.total, [], time.perf_counter()

    def figures(self, accelerator: Any, memory: int, repeats: bool) -> dict[str, float]:
        """
        Figures to log since the last call: token counts summed over all processes, and the largest peak `memory`, given
        in bytes. `repeats` says whether the model has layers that compute shared prefixes again.
        """
        seconds, new = time.perf_counter() - self.logged_at, sum(self.new, BatchCounts())
        self.logged, self.new, self.logged_at = self.logged + new, [], time.perf_counter()
        per_process = of_all_processes([*new.as_tuple(), memory], accelerator)
        computed, real, padded, _, repeated, _ = per_process.sum(0).tolist()
        if not real:
            return {}
        return {
            "flat/computed_tokens": computed,
            "flat/saved_by_padding_free": 1 - real / padded,
            "flat/saved_by_sharing": 1 - computed / real,
            "flat/tokens_per_second": real / seconds,
            "flat/peak_memory_gib": per_process[:, -1].max().item() / 2**30,
            **({"flat/repeated_by_state_layers": repeated} if repeats else {}),
        }


def of_all_processes(values: Sequence[float], accelerator: Any) -> torch.Tensor:
    """The `(processes, N)` values of all processes, on the CPU. A single process does not touch its device."""
    if accelerator.num_processes == 1:
        return torch.tensor([values])
    return accelerator.gather(torch.tensor([values], device=accelerator.device)).cpu()
