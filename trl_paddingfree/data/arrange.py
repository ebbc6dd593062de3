"""Micro-batches of an optimizer step: which of its examples meet in one.

Examples are only ever moved within one optimizer step, and every micro-batch keeps its number of examples, so that each
example has the weight in the step that it had before.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Sampler


@dataclass(eq=False)
class StepSampler(Sampler[int]):
    """
    The order of another sampler of example indices, rearranged within each optimizer step of `step_size` examples, over
    all processes and accumulation steps. An incomplete last step stays as it is: its micro-batches differ in size, so
    moving examples would change their weights. With `keeps_first`, the first step then stays, too: with several
    processes, accelerate fills the last batches with the examples that came first.
    """

    sampler: Sampler | Sequence[int]
    step_size: int
    arrange: Callable[[list[int]], list[int]]
    keeps_first: bool = False

    def __iter__(self) -> Iterator[int]:
        indices, stays = iter(self.sampler), self.keeps_first and len(self) % self.step_size > 0
        while step := list(islice(indices, self.step_size)):
            yield from step if stays or len(step) < self.step_size else self.arrange(step)
            stays = False

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the sampler underneath, if it has one: accelerate seeds it alike on every process."""
        return self.sampler.generator  # type: ignore[union-attr]

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self.sampler.generator = generator  # type: ignore[union-attr]

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader: the sampler underneath draws another order each epoch."""
        if hasattr(self.sampler, "set_epoch"):  # torch's samplers lack it, a user's own may have it
            self.sampler.set_epoch(epoch)


def balance(costs: Sequence[float] | np.ndarray, num_bins: int) -> list[list[int]]:
    """
    Items of each of `num_bins` bins of equal size that cost about the same, from the most costly bin on.

    The largest differencing method of Karmarkar and Karp (1982), in its form for bins of equal size: always merge the
    two partial distributions whose costs differ most, most costly bin with least costly bin.

    >>> balance([9, 7, 4, 3, 2, 1], num_bins=3)
    [[0, 5], [1, 4], [2, 3]]
    """
    order = np.argsort(costs, kind="stable")[::-1]
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for tie, items in enumerate(order.reshape(-1, num_bins).tolist()):
        bins = [(float(costs[item]), [item]) for item in items]
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], tie, bins))
    while len(heap) > 1:
        (_, tie, ours), (_, _, theirs) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(ours, reversed(theirs), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return [items for _, items in heap[0][2]]


def by_tokens(
    costs: Sequence[float] | np.ndarray, batch_size: int, num_processes: int
) -> Callable[[list[int]], list[int]]:
    """An arrangement of a step in which micro-batches, and processes, have about the same work: a sum of `costs`."""

    def arrange(step: list[int]) -> list[int]:
        bins = balance([costs[index] for index in step], len(step) // batch_size)
        # Processes wait for each other after each round of micro-batches, so those of a round cost about the same; and
        # after the step, so rounds are dealt out to processes in turn from the first to the last, and back
        rounds = np.array(bins).reshape(-1, num_processes, batch_size)
        rounds[1::2] = rounds[1::2, ::-1]
        return np.array(step)[rounds.ravel()].tolist()

    return arrange


def by_prefix(dataset: Dataset, column: str) -> Callable[[list[int]], list[int]]:
    """
    An arrangement of a step in which examples whose token ids in a `column` start alike stand side by side. Only those
    of the step are read.
    """
    rows = dataset.select_columns([column]).with_format("arrow")

    def arrange(step: list[int]) -> list[int]:
        keys = [ids.values.to_numpy().tobytes() for ids in rows[step][column]]
        return [index for _, index in sorted(zip(keys, step, strict=True))]

    return arrange
