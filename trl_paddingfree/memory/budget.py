"""What a pass that trains may take: tokens, memory, or both. And the parts in which a batch above that is computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch
from accelerate import Accelerator

from ..flat.batch import FlatBatch, Inputs, RowPart
from ..flat.counts import of_all_processes
from ..model.forward import is_allocation_failure
from .needs import tensor_bytes
from .plan import MemoryBudget, is_sharded

# What is left of a limit under which a part did not fit
_LOWERED = 0.9
# From the tokens of each item and a limit to the items of each part
Split = Callable[[Sequence[int], int], list[list[int]]]
Made = TypeVar("Made")


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
    tokens: Sequence[int], limit: int, split: Split, make: Callable[[list[int]], Made], fits: Callable[[Made], bool]
) -> list[Made]:
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


class HostRows(Protocol):
    """What a batch was made of, on the host, from which parts of it are made: items, each a row or the rows of one."""

    @property
    def num_items(self) -> int: ...

    def tokens(self) -> list[int]:
        """Tokens to compute of each item alone."""

    def part(self, items: list[int], reach: int | None) -> RowPart:
        """The part of some items, with positions that tell of `reach` tokens."""


class Budget:
    """
    The budget of each pass that trains: the plan under `memory_budget`, a `limit` of tokens, or both.

    `parameters` are those that get gradients. `split` says which items share a part beneath the loss or above it,
    and `smallest_part` what the smallest is called, and what makes it smaller. `is_reentrant` is whether layers
    recompute as reentrant checkpoints do.
    """

    def __init__(
        self,
        memory: MemoryBudget | None,
        limit: int | None,
        accelerator: Accelerator,
        parameters: Sequence[torch.Tensor],
        *,
        split: Split,
        is_reentrant: bool,
        smallest_part: tuple[str, str],
    ):
        self.memory, self.limit, self.accelerator, self.parameters = memory, limit, accelerator, parameters
        self.split, self.is_reentrant, self.smallest_part = split, is_reentrant, smallest_part

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes that parts beneath a loss need on top: gradients are added up over them before they reach `grad`."""
        return tensor_bytes(self.parameters)

    def fits(self, batch: FlatBatch, is_alone: bool = False) -> bool:
        """Whether a batch need not be split. One item alone may be above the limit of tokens, but not above memory."""
        in_memory = self.memory is None or self.memory.can_hold(batch)
        return in_memory and (is_alone or self.limit is None or batch.counts.computed <= self.limit)

    def _most_tokens(self, whole: FlatBatch, tokens: Sequence[int]) -> int:
        """Tokens of a part to begin with, as the sum of its items' own `tokens`: together, they may share prefixes."""
        limits = [self.limit, None if self.memory is None else self.memory.most_tokens(whole)]
        most = min(limit for limit in limits if limit is not None)
        return int(most * max(sum(tokens) / whole.counts.computed, 1))

    def batches(self, whole: FlatBatch, rows: HostRows, make: Callable[[list[int]], Inputs]) -> list[Inputs]:
        """The batches, with a `"flat_batch"` each, that `make` gives of the items of `whole`, which does not fit."""
        fits = lambda batch: self.fits(batch["flat_batch"])  # noqa: E731
        tokens = rows.tokens()
        batches = parts_that_fit(tokens, self._most_tokens(whole, tokens), self.split, make, fits)
        self._refuse_large([batch["flat_batch"] for batch in batches])
        return batches

    def decide(self, whole: FlatBatch, rows: HostRows, *, splits_beneath: bool, reach: int | None = None) -> FlatBatch:
        """
        The batch of a pass that begins: told how many of its layers recompute and, if it `splits_beneath` the loss, in
        which parts the model computes it there. Their positions tell of `reach` tokens.
        """
        memory = self.memory
        fits = not splits_beneath or self.fits(whole, is_alone=rows.num_items == 1)
        number = 0 if memory is None else memory.num_recomputed(whole)
        if is_sharded(self.accelerator) and (splits_beneath or memory is not None):  # all processes recompute as often
            number, too_large = of_all_processes([number, not fits], self.accelerator).amax(0).tolist()
            fits = not too_large
        if not fits:
            return self._in_parts(whole, rows, reach)
        if memory is None:
            return whole
        memory.start(whole, number, rows.num_items)
        return replace(whole, num_recomputed=number)

    def _in_parts(self, whole: FlatBatch, rows: HostRows, reach: int | None) -> FlatBatch:
        """A batch with the parts in which it fits, each with how many layers recompute in it on top."""
        memory, accelerator = self.memory, self.accelerator
        if is_sharded(accelerator):
            reason = "where weights are sharded it cannot run in parts, because all processes gather them together"
            raise self._cannot_split(whole, reason)
        if self.is_reentrant and accelerator.num_processes > 1:
            reason = "with `use_reentrant=True` processes exchange gradients of its last part only"
            raise self._cannot_split(whole, reason)
        extra = self.gradient_bytes if rows.num_items > 1 else 0

        def keeps_all(part: RowPart) -> bool:
            in_memory = memory is None or memory.keeps_all(part.batch, extra)
            return in_memory and (self.limit is None or part.batch.counts.computed <= self.limit)

        tokens = rows.tokens()
        most = self._most_tokens(whole, tokens)
        parts = parts_that_fit(tokens, most, self.split, lambda items: rows.part(items, reach), keeps_all)
        batches = [replace(part.batch, companion=None, packed=whole.packed) for part in parts]
        if memory is not None:
            self._refuse_large(batches, extra)
            numbers = [memory.num_recomputed(batch, extra) for batch in batches]
            batches = [replace(batch, num_recomputed=number) for batch, number in zip(batches, numbers, strict=True)]
            largest = int(np.argmax(list(map(memory.peak, batches, numbers))))
            num_items = len(parts[largest].rows) * rows.num_items // len(whole.row_mask)
            memory.start(batches[largest], numbers[largest], num_items, extra, numbers)
        parts = [replace(part, batch=batch) for part, batch in zip(parts, batches, strict=True)]
        return replace(whole, parts=tuple(parts))

    def _refuse_large(self, batches: Sequence[FlatBatch], extra: int = 0) -> None:
        """Refuse a part that memory cannot hold: unless a failed allocation has made the budget smaller since."""
        memory = self.memory
        if memory is None or memory.has_shrunk:
            return
        for batch in batches:
            if not memory.can_hold(batch, extra):
                raise memory.too_small_for(batch, *self.smallest_part, extra)

    def _cannot_split(self, batch: FlatBatch, reason: str) -> ValueError:
        if self.memory is not None and not self.memory.can_hold(batch):
            return self.memory.cannot_split(batch, reason)
        if self.fits(batch):
            return ValueError(f"A micro-batch of another process is above its budget, and {reason}: raise the budget.")
        return ValueError(
            f"`max_tokens_per_micro_batch={self.limit}` is less than the {batch.counts.computed} tokens of a "
            f"micro-batch, and {reason}. Raise it, or lower `per_device_train_batch_size`."
        )

    def shrink(self, error: RuntimeError) -> None:
        """Lower the budget if `error` says that memory ran out in a pass, and another decision follows. Else raise."""
        # Before the decision, there is no current pass: where a trainer generates its rows, with memory of its own
        if self.memory is None or self.memory.current is None or not is_allocation_failure(error):
            raise error
        if advice := self.memory.why_not_again(self.accelerator, self.is_reentrant):
            raise type(error)(f"{error}\n{advice}") from error
        if not self.memory.lower():
            raise error
