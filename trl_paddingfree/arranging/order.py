"""Decides which examples of an optimizer step share a micro-batch.

Examples only move within one optimizer step, and every micro-batch keeps its number of examples, so that the weight of
each example in the step does not change.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Sampler

Arrange = Callable[[list[int]], list[int]]  # puts the examples of a step, by index, into another order
Costs = Sequence[float] | np.ndarray  # one for each example


@dataclass(eq=False)
class StepSampler(Sampler[int]):
    """
    Wraps a sampler of example indices and rearranges its order within each optimizer step of `step_size` examples, over
    all processes and accumulation steps. An incomplete last step stays as it is: its micro-batches differ in size, so
    moving examples would change their weights. With `keeps_first`, the first step then stays, too: with several
    processes, accelerate fills up the last batches with the first examples.
    """

    sampler: Sampler | Sequence[int]
    step_size: int
    arrange: Arrange
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
        """The generator of the wrapped sampler, if it has one: accelerate seeds it alike on every process."""
        return self.sampler.generator  # type: ignore[union-attr]

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self.sampler.generator = generator  # type: ignore[union-attr]

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader, for a new order each epoch."""
        if hasattr(self.sampler, "set_epoch"):  # torch's samplers lack it, a user's own may have it
            self.sampler.set_epoch(epoch)


def balance(costs: Costs, num_bins: int) -> list[list[int]]:
    """
    Split items into `num_bins` bins of equal size and about equal cost, most costly bin first.

    The largest differencing method of Karmarkar and Karp (1982), in its form for bins of equal size: always merge the
    two partial solutions with the widest spread of costs, most costly bins of one with least costly ones of the other.

    >>> balance([9, 7, 4, 3, 2, 1], num_bins=3)
    [[0, 5], [1, 4], [2, 3]]
    """
    by_cost = np.argsort(costs, kind="stable")[::-1].reshape(-1, num_bins).tolist()
    solutions = [[(float(costs[item]), [item]) for item in items] for items in by_cost]

    def spread(number):
        bins = solutions[number]
        return bins[0][0] - bins[-1][0]

    while len(solutions) > 1:
        widest, next_widest = heapq.nlargest(2, range(len(solutions)), key=spread)
        pairs = zip(solutions[widest], reversed(solutions[next_widest]), strict=True)
        merged = [(a + b, x + y) for (a, x), (b, y) in pairs]
        solutions[widest] = sorted(merged, key=lambda entry: -entry[0])
        del solutions[next_widest]
    return [items for _, items in solutions[0]]


def by_tokens(costs: Costs, batch_size: int, num_processes: int) -> Arrange:
    """A function that arranges a step so that micro-batches, and processes, have about equal work: sums of `costs`."""

    def arrange(step):
        bins = balance([costs[index] for index in step], len(step) // batch_size)
        # Processes wait for each other after each round of micro-batches, so those of a round cost about the same; and
        # after the step, so rounds are dealt out alternately from the first process to the last, and back
        rounds = np.array(bins).reshape(-1, num_processes, batch_size)
        rounds[1::2] = rounds[1::2, ::-1]
        return np.array(step)[rounds.ravel()].tolist()

    return arrange


def by_prefix(dataset: Dataset, column: str) -> Arrange:
    """
    A function that arranges a step so that examples with a common prefix of token ids in `column` are adjacent. Only
    the examples of the step are read.
    """
    rows = dataset.select_columns([column]).with_format("arrow")

    def arrange(step):
        keys = [ids.values.to_numpy().tobytes() for ids in rows[step][column]]
        return [index for _, index in sorted(zip(keys, step, strict=True))]

    return arrange
