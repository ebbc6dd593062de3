"""How many tokens a run has computed, and what padding would have computed."""

import time
from typing import Any

import torch

from ..flat.batch import BatchCounts
from .peak_memory import peak_memory


class TokenCounts:
    """The [`~trl_paddingfree.BatchCounts`] of a run, of this process: before the last log, and since."""

    def __init__(self) -> None:
        self.logged, self.new, self.logged_at = BatchCounts(), BatchCounts(), time.perf_counter()

    def add(self, counts: BatchCounts) -> None:
        """Add the counts of a micro-batch."""
        self.new += counts

    @property
    def total(self) -> BatchCounts:
        """What this process has computed so far."""
        return self.logged + self.new

    def figures(self, accelerator: Any, with_state: bool) -> dict[str, float]:
        """
        Figures since the last call, summed over all processes; the peak memory of the process that uses most.

        Args:
            accelerator ([`~accelerate.Accelerator`]):
                The trainer's.
            with_state (`bool`):
                Whether the model has layers that carry state.
        """
        seconds = time.perf_counter() - self.logged_at
        new, memory = self.new, torch.tensor([peak_memory(accelerator.device)[1]], device=accelerator.device)
        self.logged, self.new, self.logged_at = self.total, BatchCounts(), time.perf_counter()
        computed, real, padded, _, repeated = gathered(new, accelerator).as_tuple()
        most_memory = accelerator.gather(memory).max().item()
        if not real:
            return {}
        return {
            "flat/computed_tokens": computed,
            "flat/saved_by_padding_free": 1 - real / padded,
            "flat/saved_by_sharing": 1 - computed / real,
            "flat/tokens_per_second": real / seconds,
            "flat/peak_memory_gib": most_memory,
            **({"flat/repeated_by_state_layers": repeated} if with_state else {}),
        }


def gathered(counts: BatchCounts, accelerator: Any) -> BatchCounts:
    """The sum of the counts of all processes."""
    counted = torch.tensor([counts.as_tuple()], device=accelerator.device)
    return BatchCounts(*accelerator.gather(counted).sum(0).tolist())
