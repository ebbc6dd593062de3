"""Training steps under a budget of tokens or of memory: whole, in parts, and once more where memory ran out.

Where losses add up, parts are computed one after another, and nothing is computed twice. Where the loss of an example
depends on others, the model computes rows in parts beneath it, see [`~trl_paddingfree.model.forward.forward_in_parts`].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from accelerate import DistributedType

from ..flat.batch import FlatBatch, RowPart
from ..flat.counts import of_all_processes
from ..model.forward import is_allocation_failure
from .device import Attempt
from .needs import tensor_bytes
from .parts import Part, PartMetrics, Split, parts_that_fit, split_by_tokens, weighted_parts
from .plan import MemoryBudget, is_sharded

Loss = torch.Tensor
Step = Callable[[dict[str, Any]], Loss]
Within = tuple[Part, PartMetrics] | None  # the part of a micro-batch that is being computed


class BudgetedSteps:
    """The training steps of a trainer under `memory_budget`, with its plan, a `limit` of tokens, or both."""

    def __init__(self, trainer: Any, memory: MemoryBudget | None, limit: int | None):
        self.trainer, self.memory, self.limit = trainer, memory, limit
        self.current: Within = None
        self.is_weighted = False  # whether the loss of that part is
        self.attempt: Attempt | None = None  # of the pass that is being made, if it can be taken back
        # Of this pass: the part that needs most, how many layers recompute in it, and how many rows it has
        self.largest: tuple[FlatBatch, int, int] | None = None
        self.recomputes_twice = False  # whether layers recompute within parts that are computed again

    def fits(self, batch: FlatBatch, is_alone: bool = False) -> bool:
        """Whether a batch need not be split. One item alone may be above the limit of tokens, but not above memory."""
        in_memory = self.memory is None or self.memory.can_hold(batch)
        return in_memory and (is_alone or self.limit is None or batch.counts.computed <= self.limit)

    def _most_tokens(self, batch: FlatBatch) -> int:
        """Tokens of a part to begin with."""
        limits = [self.limit, None if self.memory is None else self.memory.most_tokens(batch)]
        return min(limit for limit in limits if limit is not None)

    # --- parts above the loss ---------------------------------------------------------------------------------------

    def in_parts(self, step: Step, inputs: dict[str, Any], num_items: Any) -> Loss:
        """
        Forward and backward pass of a micro-batch in as many parts as need be, where losses add up: `step` is one of a
        batch, `inputs` the batch, with what it was made of under `"rows"`, and `num_items` the tokens of the whole
        step, if the loss is normalized by them.
        """
        batches = self._parts(inputs)
        if batches[0] is not inputs:
            self.trainer.refuse_edits_of_whole(inputs)
        most, number = self._agree_on_parts(batches)
        accelerator = self.trainer.accelerator
        # Where each backward pass is one of all processes, those with fewer parts repeat one
        in_step = is_sharded(accelerator) or accelerator.distributed_type == DistributedType.DEEPSPEED
        if most == 1:
            self._count(inputs, batches)
            return self._attempted(step, inputs, num_items, number)
        is_normalized = num_items is not None
        num_wanted = most if in_step else len(batches)
        parts = weighted_parts(batches, self.trainer.part_sizes, num_wanted=num_wanted, is_normalized=is_normalized)
        self._count(inputs, [part.inputs for part in parts])
        return self._sum_of(step, parts, num_items, number)

    def _count(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        counts = [part["flat_batch"].counts for part in parts]
        self.trainer.counts.add(inputs["flat_batch"].counts.in_parts(counts))

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """The batches that fit; `inputs` if that does."""
        batch, rows, memory = inputs["flat_batch"], inputs["rows"], self.memory
        if self.fits(batch):
            return [inputs]
        reach, limit = self.trainer.reach_of(batch), self._most_tokens(batch)

        def make(examples: list[int]) -> dict[str, Any]:
            return rows.take(examples).batch(reach)

        parts = parts_that_fit(rows.tokens(), limit, split_by_tokens, make, lambda part: self.fits(part["flat_batch"]))
        # An allocation that failed has made the budget smaller than the data was measured by
        for part in parts:
            if memory is not None and not memory.has_shrunk and not memory.can_hold(part["flat_batch"]):
                raise memory.too_small_for(part["flat_batch"], *self.trainer.smallest_part)
        return parts

    def _agree_on_parts(self, batches: list[dict[str, Any]]) -> tuple[int, int | None]:
        """The most parts that any process has; and how many layers all must recompute, if weights are sharded."""
        accelerator, memory = self.trainer.accelerator, self.memory
        numbers = [memory.num_recomputed(batch["flat_batch"]) for batch in batches] if memory else [0]
        most, number = of_all_processes([len(batches), max(numbers)], accelerator).amax(0).tolist()
        return most, number if memory and is_sharded(accelerator) else None

    def _attempted(
        self, step: Step, inputs: dict[str, Any], num_items: Any, number: int | None = None, within: Within = None
    ) -> Loss:
        """
        Forward and backward pass of a micro-batch, or of a part of one: `number` layers recompute, or as many as must.
        If memory runs out nevertheless, it is computed again with more of them, or in parts.
        """
        memory, batch = self.memory, inputs["flat_batch"]
        if memory is None:
            return self._once(step, inputs, within)
        attempt = Attempt(self.trainer, None if within is None else within[1].sums)
        number = memory.num_recomputed(batch) if number is None else number
        memory.start(batch, number)
        try:
            loss = self._once(step, {**inputs, "flat_batch": replace(batch, recomputed=number)}, within)
            memory.finish(has_stepped=self.trainer.state.global_step > 0)
            return loss
        except RuntimeError as error:
            advice = memory.why_not_again(self.trainer.accelerator)
            self._raise_if_final(error, advice, (batch, number, inputs["rows"].num_examples))
        # Here the error is gone, and with it all that its frames held
        with attempt.undone():
            return self._again(step, inputs, num_items, within)

    def _raise_if_final(self, error: RuntimeError, advice: str, computed: tuple[FlatBatch, int, int]) -> None:
        """Raise what was raised, unless it says that memory ran out and another decision follows from that."""
        if not is_allocation_failure(error):
            raise error
        if advice:
            raise type(error)(f"{error}\n{advice}") from error
        assert self.memory is not None
        if not self.memory.shrink(*computed):
            raise error

    def _once(self, step: Step, inputs: dict[str, Any], within: Within) -> Loss:
        """One forward and backward pass."""
        arguments = {name: value for name, value in inputs.items() if name != "rows"}
        if within is None:
            return step(arguments)
        self.current, self.is_weighted = within, False
        try:
            with self.trainer.synchronizing(within[0].is_last):
                loss = step(arguments)
        finally:
            self.current = None
        if not self.is_weighted:
            raise ValueError(
                f"`{type(self.trainer).__name__}.compute_loss` does not call `super().compute_loss`, which weights "
                "the losses of parts: call it, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
            )
        return loss

    def _again(self, step: Step, inputs: dict[str, Any], num_items: Any, within: Within) -> Loss:
        """A micro-batch, or a part of one, in parts that fit into the budget as it is now."""
        batches = self._parts(inputs)
        if len(batches) == 1:
            return self._attempted(step, inputs, num_items, None, within)
        is_normalized, sizes = num_items is not None, self.trainer.part_sizes
        parts = weighted_parts(batches, sizes, num_wanted=len(batches), is_normalized=is_normalized)
        if within is not None:  # gradients are synchronized after the last part of the last part
            weight = 1.0 if is_normalized else within[0].weight
            is_last = within[0].is_last
            parts = [replace(part, weight=part.weight * weight, is_last=part.is_last and is_last) for part in parts]
        return self._sum_of(step, parts, num_items, None, within)

    def _sum_of(
        self, step: Step, parts: Sequence[Part], num_items: Any, number: int | None, within: Within = None
    ) -> Loss:
        """The losses of parts, added up; their metrics are logged with those of the part that they are of, if any."""
        metrics = PartMetrics(self.trainer) if within is None else within[1]
        losses = [self._attempted(step, part.inputs, num_items, number, (part, metrics)) for part in parts]
        if within is None:
            metrics.log()
        return torch.stack(losses).sum()

    # --- parts beneath the loss -------------------------------------------------------------------------------------

    def beneath(self, step: Callable[[], Loss]) -> Loss:
        """
        Forward and backward pass of a micro-batch whose loss couples rows, made again if memory runs out. Each time,
        `step` says by [`BudgetedSteps.begin`] from where on, and gets the parts of its rows from
        [`BudgetedSteps.divided`].
        """
        self.attempt = self.largest = None
        memory = self.memory
        try:
            loss = step()
            if memory is not None:
                memory.finish(has_stepped=self.trainer.state.global_step > 0)
            return loss
        except RuntimeError as error:
            # Generation and the reference have memory of their own
            if self.attempt is None or self.largest is None or memory is None:
                raise
            self._raise_if_final(error, self._why_not_again(memory), self.largest)
            attempt = self.attempt
        finally:
            self.attempt = None
        # Here the error is gone, and with it all that its frames held
        with attempt.undone():
            return self.beneath(step)

    def begin(self) -> None:
        """The pass that trains begins: what it changes from here on can be taken back."""
        if self.memory is not None:
            self.attempt = Attempt(self.trainer)

    def divided(
        self, whole: FlatBatch, tokens: Sequence[int], make: Callable[[list[int]], RowPart], split: Split
    ) -> FlatBatch:
        """
        The batch of a pass that trains, with the parts in which it fits.

        `tokens` are those of each item that is not divided, a row or a pair of them; `make` gives the part of some
        items, and `split` says which share one, see [`~trl_paddingfree.memory.parts`].
        """
        memory, accelerator = self.memory, self.trainer.accelerator
        fits = self.fits(whole, is_alone=len(tokens) == 1)
        number = 0 if memory is None else memory.num_recomputed(whole)
        if is_sharded(accelerator):  # all processes recompute as often
            number, too_large = of_all_processes([number, not fits], accelerator).amax(0).tolist()
            fits = not too_large
        if fits:
            if memory is None:
                return whole
            memory.start(whole, number)
            self.largest, self.recomputes_twice = (whole, number, len(tokens)), False
            return replace(whole, recomputed=number)
        if is_sharded(accelerator):
            reason = "where weights are sharded it cannot run in parts, because all processes gather them together"
            raise self._cannot_split(whole, reason)
        if self._is_reentrant and accelerator.num_processes > 1:
            reason = "with `use_reentrant=True` processes exchange gradients of its last part only"
            raise self._cannot_split(whole, reason)
        beside = self.beside if len(tokens) > 1 else 0

        def keeps_all(part: RowPart) -> bool:
            in_memory = memory is None or memory.keeps_all(part.batch, beside)
            return in_memory and (self.limit is None or part.batch.counts.computed <= self.limit)

        # Items that share prefixes need fewer tokens together than by themselves
        most = self._most_tokens(whole) * max(sum(tokens) / whole.counts.computed, 1)
        parts = parts_that_fit(tokens, int(most), split, make, keeps_all)
        if memory is not None:
            parts = self._start_parts(memory, parts, beside)
        return replace(whole, parts=tuple(parts))

    def _start_parts(self, memory: MemoryBudget, parts: list[RowPart], beside: int) -> list[RowPart]:
        """The parts, each with how many layers recompute in it on top."""
        for part in () if memory.has_shrunk else parts:
            if not memory.can_hold(part.batch, beside):
                name, lower = self.trainer.smallest_part
                raise memory.too_small_for(part.batch, name, lower, beside)
        numbers = [memory.num_recomputed(part.batch, beside) for part in parts]
        peaks = [memory.peak(part.batch, number) for part, number in zip(parts, numbers, strict=True)]
        most = peaks.index(max(peaks))
        self.largest = (parts[most].batch, numbers[most], len(parts[most].rows))
        self.recomputes_twice = any(numbers)
        memory.start(parts[most].batch, numbers[most], beside)
        memory.number = len(memory.layers)  # each of which is computed again with its part
        batches = [replace(part.batch, recomputed=number) for part, number in zip(parts, numbers, strict=True)]
        return [replace(part, batch=batch) for part, batch in zip(parts, batches, strict=True)]

    @cached_property
    def beside(self) -> int:
        """Bytes that parts beneath a loss need on top: gradients are added up over them before they reach `grad`."""
        return tensor_bytes(p for p in self.trainer.model.parameters() if p.requires_grad)

    @property
    def _is_reentrant(self) -> bool:
        return bool((self.trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))

    def _cannot_split(self, batch: FlatBatch, reason: str) -> ValueError:
        if self.memory is not None and not self.memory.can_hold(batch):
            return self.memory.cannot_split(batch, reason)
        if self.fits(batch):
            return ValueError(f"A micro-batch of another process is above its budget, and {reason}: raise the budget.")
        return ValueError(
            f"`max_tokens_per_micro_batch={self.limit}` is less than the {batch.counts.computed} tokens of a "
            f"micro-batch, and {reason}. Raise it, or lower `per_device_train_batch_size`."
        )

    def _why_not_again(self, memory: MemoryBudget) -> str:
        """Why a micro-batch cannot be computed again after a failed allocation; empty if it can."""
        if self.recomputes_twice and self._is_reentrant:
            return (
                "Layers that recompute within parts of a micro-batch add to the same gradients several times with "
                "`use_reentrant=True`, so that it cannot be computed again. Leave `use_reentrant` out."
            )
        return memory.why_not_again(self.trainer.accelerator)
