"""Micro-batches in parts: which examples share one, what each is made of, and the figures of the whole."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..flat.counts import of_all_processes
from ..model.restored import attributes_set

# Methods by which losses and metrics exchange figures between processes
_COLLECTIVE = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
# What is left of a limit under which a part did not fit
_LOWERED = 0.9
# From the tokens of each item and a limit to the items of each part
Split = Callable[[Sequence[int], int], list[list[int]]]


def split_by_tokens(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """
    The items of each part of a micro-batch, by the tokens to compute of each item: as few parts as first-fit finds,
    none of more than `limit` tokens, but for items above the limit, which get a part of their own.

    >>> split_by_tokens([30, 50, 20, 60], limit=80)
    [[2, 3], [0, 1]]
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


def split_in_order(tokens: Sequence[int], limit: int) -> list[list[int]]:
    """The same of items that stay beside their neighbours, with whom they share a prefix."""
    parts: list[list[int]] = []
    for item in range(len(tokens)):
        if parts and sum(tokens[i] for i in parts[-1]) + tokens[item] <= limit:
            parts[-1].append(item)
        else:
            parts.append([item])
    return parts


def parts_that_fit(
    tokens: Sequence[int], limit: int, split: Split, make: Callable[[list[int]], Any], fits: Callable[[Any], bool]
) -> list[Any]:
    """
    What `make` gives of the items of each part of a micro-batch, in parts that fit: as few as `split`, one of the
    functions above, finds by their tokens. An item alone is a part in any case.

    `limit` is what parts begin with; examples of another kind than the rest may need fewer tokens.

    >>> parts_that_fit([1, 1, 1, 1, 9], 5, split_in_order, make=sum, fits=lambda total: total < 4)
    [3, 3, 4]
    """
    while True:
        items = split(tokens, limit)
        parts = list(map(make, items))
        if limit < 1 or all(len(of_part) == 1 or fits(part) for of_part, part in zip(items, parts, strict=True)):
            return parts
        limit = int(_LOWERED * min(limit, max(sum(tokens[i] for i in of_part) for of_part in items)))


@dataclass(frozen=True)
class Part:
    """A part of a micro-batch."""

    inputs: dict[str, Any]  # its batch
    # How many its loss, under the name "loss", and each of its metrics is a mean over. All 0 if the part is computed
    # only to keep step with other processes
    sizes: dict[str, int]
    weight: float  # by what its loss is multiplied, so that the losses of all parts add up to that of the micro-batch
    is_last: bool  # gradients are synchronized after it


def weighted_parts(
    batches: list[dict[str, Any]], count: Callable[[Any], dict[str, int]], *, num_wanted: int, is_normalized: bool
) -> list[Part]:
    """
    The parts of a micro-batch, with their weights; `count` gives the sizes of a batch, see [`Part`].

    `num_wanted` is how many parts there have to be: where processes gather weights, or reduce gradients, in each pass,
    those with fewer parts than others repeat one for nothing. With `is_normalized`, the loss is normalized by the
    tokens of the whole step, and adds up by itself.
    """
    sizes, idle = [count(batch) for batch in batches], num_wanted - len(batches)
    whole = max(sum(size["loss"] for size in sizes), 1)
    parts = [
        Part(batch, size, 1.0 if is_normalized else size["loss"] / whole, i == num_wanted - 1)
        for i, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    ]
    for i in range(idle):
        nothing = {**batches[-1], "attention_mask": torch.zeros_like(batches[-1]["attention_mask"])}
        parts.append(Part(nothing, dict.fromkeys(sizes[-1], 0), 0.0, i == idle - 1))
    return parts


class PartMetrics:
    """TRL's metrics of a micro-batch that runs in parts: sums over those of this process, gathered once at the end."""

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.metrics, self.tokens_before = trainer._metrics["train"], trainer._total_train_tokens
        # Of each metric times what it is a mean over, and of that
        self.sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.extremes: dict[str, list[float]] = {name: [] for name in trainer.extremes}
        self.seen: set[str] = set()

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Within this context, what is logged is that of one part on this process: parts of others differ in size."""
        logged = {name: len(values) for name, values in self.metrics.items()}
        # Processes have different numbers of parts
        alone = dict.fromkeys(_COLLECTIVE, lambda tensor, *args, **kwargs: tensor)
        with attributes_set((self.accelerator, name, function) for name, function in alone.items()):
            yield
        for name in part.sizes.keys() - {"loss"}:
            self.sums[name] += 0  # parts of other processes may log what none here does, and all gather the same
        for name in (name for name, values in self.metrics.items() if len(values) > logged.get(name, 0)):
            value, size = self.metrics[name].pop(), part.sizes.get(name, part.sizes["loss"])
            if name in self.extremes:
                self.extremes[name].append(value)
            elif name not in self.trainer.differences:
                self.sums[name] += (value * size if size else 0.0, size)  # a mean over nothing may be `nan`
                self.seen.add(name)

    def log(self) -> None:
        """Log the metrics of the whole micro-batch, over all parts of all processes."""
        names, whole = sorted(self.sums), {}
        values = [x for name in names for x in self.sums[name]]
        values.append(self.trainer._total_train_tokens - self.tokens_before)
        *totals, tokens = of_all_processes(values, self.accelerator).sum(0).tolist()
        for name, total, size in zip(names, totals[::2], totals[1::2], strict=True):
            if size or name in self.seen:
                self.metrics[name].append(total / max(size, 1))
                whole[name] = self.metrics[name][-1]
        for name, extreme in self.trainer.extremes.items():
            found = of_all_processes([extreme(self.extremes[name])], self.accelerator)
            self.metrics[name].append(extreme(found[:, 0].tolist()))
        for name, (one, other) in self.trainer.differences.items():
            if one in whole and other in whole:
                self.metrics[name].append(whole[one] - whole[other])
        self.trainer._total_train_tokens = self.tokens_before + int(tokens)
        self.metrics["num_tokens"] = [self.trainer._total_train_tokens]
