"""Micro-batches under a memory budget: in parts, recomputed and computed again, each only as far as needed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..batching.lengths import example_tokens, row_lengths
from .attempts import Attempt
from .memory_budget import MemoryBudget, is_allocation_failure, is_sharded
from .micro_batches import Part, PartMetrics, weighted_parts
from .planned import PlannedMemory

Within = tuple[Part, PartMetrics]
# How many of the largest examples are looked at, by each measure
_CANDIDATES = 16


class BudgetedSteps(PlannedMemory):
    """The part of the padding-free trainers that keeps to a `memory_budget`."""

    train_dataset: Any
    _is_vision_dataset: Any
    coupled_by: Callable[[], list[str]]
    example_lengths: Callable[[], Any]
    part_sizes: Callable[[dict[str, Any]], dict[str, int]]

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that the most demanding example does not fit into."""
        if not isinstance(self.train_dataset, Dataset) or self._is_vision_dataset:
            return  # lengths are not known before an example comes, and then it is refused
        lengths = self.example_lengths()
        # Layers need most for the most tokens, attention for the longest row, the head for the longest completions, and
        # all together for an example that is among the largest by one of these
        tokens, rows = example_tokens(lengths, memory.route.prefix_sharing), row_lengths(lengths).max(1)
        measures = (tokens, rows, lengths[:, -2:].sum(1))
        candidates = {int(i) for measure in measures for i in np.argsort(measure, kind="stable")[-_CANDIDATES:]}
        batches = {index: self.data_collator([self.train_dataset[index]])["flat_batch"] for index in candidates}
        worst = max(batches, key=lambda index: memory.least(batches[index]))
        if not memory.can_hold(batches[worst]):
            raise memory.too_small_for(batches[worst], f"example {worst} of the training data")

    def parts_of(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """The batches that a micro-batch is computed in: as the collator cut it, or as the memory budget asks for."""
        if self.flat is None or self.flat.memory is None:
            return inputs.pop("parts", [inputs])
        return self._parts_in_memory(inputs, self.flat.memory)

    def _parts_in_memory(self, inputs: dict[str, Any], memory: MemoryBudget) -> list[dict[str, Any]]:
        """The batches that fit into the memory budget."""
        if memory.fits(inputs["flat_batch"]):
            return [inputs]
        parts = memory.split(inputs["flat_batch"], inputs["examples"])
        if len(parts) > 1 and (coupled := self.coupled_by()):
            names = ", ".join(coupled)
            reason = f"with {names} it cannot run in parts, because the loss of an example depends on the others"
            raise memory.cannot_split(inputs["flat_batch"], reason)
        # An allocation that failed has made the budget smaller than the data was measured by
        for part in () if memory.has_shrunk else parts:
            if not memory.can_hold(part["flat_batch"]):
                raise memory.too_small_for(part["flat_batch"], "an example of the training data")
        return parts

    def agree_on_parts(self, batches: list[dict[str, Any]]) -> tuple[int, int | None]:
        """The most parts that any process has; and how many layers all must recompute, if weights are sharded."""
        memory: MemoryBudget | None = self.flat.memory
        numbers = [memory.num_recomputed(batch["flat_batch"]) for batch in batches] if memory else [0]
        most, number = len(batches), max(numbers)
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([[most, number]], device=self.accelerator.device)
            most, number = self.accelerator.gather(mine).amax(0).tolist()
        return most, number if memory and is_sharded(self.accelerator) else None

    def attempt(self, model, inputs, num_items_in_batch, number=None, within: Within | None = None) -> torch.Tensor:
        """
        Forward and backward pass of a micro-batch, or of a part of one.

        Under a memory budget, `number` layers recompute, or as many as must; if memory runs out nevertheless, it is
        computed again with more of them, or in parts.
        """
        memory: MemoryBudget | None = self.flat.memory if self.flat else None
        if memory is None:
            return self._once(model, inputs, num_items_in_batch, within)
        batch, attempt = inputs["flat_batch"], Attempt(self, None if within is None else within[1].sums)
        number = memory.num_recomputed(batch) if number is None else number
        memory.start(batch, number)
        try:
            loss = self._once(model, inputs, num_items_in_batch, within)
            memory.finish(has_stepped=self.state.global_step > 0)
            return loss
        except RuntimeError as error:
            if not is_allocation_failure(error):
                raise
            if advice := memory.why_not_again(self.accelerator):
                raise type(error)(f"{error}\n{advice}") from error
            if not memory.shrink(batch, number, len(inputs["examples"].examples)):
                raise
        finally:
            memory.number = None  # whatever happened: the model may go on under another trainer
        # Here the error is gone, and with it all that its frames held
        with attempt.undone():
            return self._again(model, inputs, num_items_in_batch, within)

    def _once(self, model, inputs, num_items_in_batch, within: Within | None) -> torch.Tensor:
        """One forward and backward pass."""
        arguments = {name: value for name, value in inputs.items() if name != "examples"}
        if within is None:
            return super().training_step(model, arguments, num_items_in_batch)
        part, metrics = within
        return self.step_of_part(model, replace(part, inputs=arguments), metrics, num_items_in_batch)

    def step_of_part(self, model, part: Part, metrics: PartMetrics, num_items_in_batch) -> torch.Tensor:
        """Forward and backward pass of a part."""
        raise NotImplementedError

    def _again(self, model, inputs, num_items_in_batch, within: Within | None) -> torch.Tensor:
        """A micro-batch, or a part of one, in parts that fit into the budget as it is now."""
        batches = self._parts_in_memory(inputs, self.flat.memory)
        if len(batches) == 1:
            return self.attempt(model, inputs, num_items_in_batch, None, within)
        is_normalized = num_items_in_batch is not None
        parts = weighted_parts(batches, self.part_sizes, num_wanted=len(batches), is_normalized=is_normalized)
        metrics = PartMetrics(self) if within is None else within[1]
        if within is not None and not is_normalized:
            parts = [replace(part, weight=part.weight * within[0].weight) for part in parts]
        losses = [self.attempt(model, part.inputs, num_items_in_batch, None, (part, metrics)) for part in parts]
        if within is None:
            metrics.log()
        return torch.stack(losses).sum()
