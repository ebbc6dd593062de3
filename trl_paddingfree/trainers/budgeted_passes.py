"""The passes of trainers that generate their rows, under a memory budget."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset

from ..batching.arrange import by_prefix, ranks_of
from ..flat.batch import IGNORE_INDEX, FlatBatch
from ..model.recompute import recompute_first
from ..model.row_parts import RowPart
from .attempts import Attempt
from .memory_budget import MemoryBudget, is_allocation_failure, is_sharded
from .memory_needs import tensor_bytes
from .planned import PlannedMemory


class BudgetedPasses(PlannedMemory):
    """
    The part of the trainers that generate their rows which keeps to a `memory_budget`.

    The loss of a micro-batch is TRL's, over all its rows, so that it may couple them. What does not fit is divided
    below it, where the model is called: see [`~trl_paddingfree.model.row_parts`].
    """

    model: Any
    flat_base: Callable[[Any], Any]
    prove_placed: Callable[[Any], None]
    aux_loss_enabled: Any
    _tokenize_prompts: Any
    counts: Any
    max_completion_length: Any
    environment_factories: Any = None
    # The forward and backward pass that is being made, and its rows; `None` before it begins
    undoable: Attempt | None = None
    attempted: Any = None
    counted: Any  # what had been counted before it
    # Of this pass: the part that needs most, how many layers recompute in it, and how many rows it has
    largest: tuple[FlatBatch, int, int] | None = None
    recomputes_twice = False  # whether layers recompute within parts that are computed again

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        super().refuse_arguments(arguments)
        config = arguments["args"]
        if self.flat.options.memory_budget == "auto" and config.use_vllm and config.vllm_mode == "colocate":
            raise ValueError(
                "`memory_budget='auto'` with `vllm_mode='colocate'` does not know what vLLM leaves: set the GiB that "
                "training may use."
            )

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that one row does not fit into, if its completion is as long as it may be."""
        prompt, completion = self.longest_prompt(), self.max_completion_length
        if completion is None:
            return
        row = [0] * (prompt + completion)
        batch = FlatBatch.from_rows([row], [[IGNORE_INDEX] * prompt + row[prompt:]], prefix_sharing=False)
        beside = self.beside_parts() if self.args.per_device_train_batch_size > 1 else 0
        if not memory.can_hold(batch, beside):
            name = f"a prompt of {prompt} tokens with a completion of `max_completion_length={completion}`"
            raise memory.too_small_for(batch, name, "`max_completion_length`", beside)

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, by its characters; 1 where prompts are not known before."""
        data = self.train_dataset
        if not isinstance(data, Dataset) or "prompt" not in data.column_names or self.environment_factories:
            return 1
        longest = max(data["prompt"], key=lambda prompt: len(str(prompt)))
        return len(self._tokenize_prompts([longest])[0][0])

    def beside_parts(self) -> int:
        """Bytes that a micro-batch in parts needs on top: gradients are added up over them before they reach `grad`."""
        return tensor_bytes(p for p in self.model.parameters() if p.requires_grad)

    # --- the policy's pass ------------------------------------------------------------------------------------------

    def rows_in_memory(
        self, whole: FlatBatch, prompts: Sequence[bytes], made: Callable[[list[int]], FlatBatch]
    ) -> list[RowPart]:
        """
        The rows of the pass that trains, in parts that fit into the memory budget.

        Args:
            whole ([`~trl_paddingfree.FlatBatch`]):
                All rows.
            prompts (`Sequence[bytes]`):
                What tells their prompts apart.
            made (`Callable`):
                Gives the flat batch of some of them.
        """
        memory: MemoryBudget = self.flat.memory
        rows = list(range(len(prompts)))
        # Where weights are sharded, all processes recompute as often
        number, fits = self._agreed(memory.num_recomputed(whole), memory.can_hold(whole))
        if fits:
            memory.start(whole, number)
            self.largest, self.recomputes_twice = (whole, number, len(rows)), False
            return [RowPart(torch.tensor(rows), whole, partial(recompute_first, memory.layers, number))]
        if reason := self._why_whole():
            raise memory.cannot_split(whole, reason)
        beside = self.beside_parts() if len(rows) > 1 else 0
        parts = divided(by_prefix(ranks_of(prompts))(rows), made, lambda batch: memory.keeps_all(batch, beside))
        for _, batch in parts:
            if not memory.can_hold(batch, beside):
                name = f"a row of {batch.counts.real} tokens"
                raise memory.too_small_for(batch, name, "`max_completion_length`", beside)
        numbers = [memory.num_recomputed(batch, beside) for _, batch in parts]
        peaks = [memory.peak(batch, number) for (_, batch), number in zip(parts, numbers, strict=True)]
        most = peaks.index(max(peaks))
        self.largest, self.recomputes_twice = (parts[most][1], numbers[most], len(parts[most][0])), any(numbers)
        memory.start(parts[most][1], numbers[most], beside)
        memory.number = len(memory.layers)  # each of which is computed again with its part
        return [
            RowPart(torch.tensor(rows), batch, partial(recompute_first, memory.layers, number))
            for (rows, batch), number in zip(parts, numbers, strict=True)
        ]

    def _agreed(self, number: int, fits: bool) -> tuple[int, bool]:
        """How many layers recompute, and whether rows fit, on the process that has to recompute most."""
        if self.accelerator.num_processes == 1 or not is_sharded(self.accelerator):
            return number, fits
        mine = torch.tensor([[number, not fits]], device=self.accelerator.device)
        number, too_large = self.accelerator.gather(mine).amax(0).tolist()
        return number, not too_large

    def _why_whole(self) -> str:
        """Why rows cannot run in parts; empty if they can."""
        if self.aux_loss_enabled:
            return "with a router loss it cannot run in parts, because that is one of all tokens together"
        if is_sharded(self.accelerator):
            return "where weights are sharded it cannot run in parts, because all processes gather them together"
        return ""

    def _why_not_again(self, memory: MemoryBudget) -> str:
        """Why a micro-batch cannot be computed again after a failed allocation; empty if it can."""
        kwargs: Any = self.args.gradient_checkpointing_kwargs or {}
        if self.recomputes_twice and kwargs.get("use_reentrant"):
            return (
                "Layers that recompute within parts of a micro-batch add to the same gradients several times with "
                "`use_reentrant=True`, so that it cannot be computed again. Leave `use_reentrant` out."
            )
        return memory.why_not_again(self.accelerator)

    # --- attempts ---------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.flat is not None and self.flat.memory is not None and self.model.training:
            self.undoable, self.attempted = Attempt(self), inputs
            self.counted = self.counts.new
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.flat is None or self.flat.options.memory_budget is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self.prove_placed(model)  # if it still had to wait for the weights, so had the plan
        self.plan_memory()
        memory: MemoryBudget = self.flat.memory
        self.largest = None
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            memory.finish(has_stepped=self.state.global_step > 0)
            return loss
        except RuntimeError as error:
            # Generation and the reference have memory of their own
            if self.undoable is None or self.largest is None or not is_allocation_failure(error):
                raise
            if advice := self._why_not_again(memory):
                raise type(error)(f"{error}\n{advice}") from error
            if not memory.shrink(*self.largest):
                raise
            attempt, again = self.undoable, self.attempted
        finally:
            self.undoable = self.attempted = memory.number = None
        # Here the error is gone, and with it all that its frames held
        self.attempted, self.counts.new = again, self.counted
        with attempt.undone():
            return self.training_step(model, inputs, num_items_in_batch)


def divided(
    rows: list[int], made: Callable[[list[int]], FlatBatch], fits: Callable[[FlatBatch], bool]
) -> list[tuple[list[int], FlatBatch]]:
    """
    Rows in parts, each half of another, of which those of more than one row fit.

    Examples:
    ```python
    >>> from trl_paddingfree.trainers.budgeted_passes import divided
    >>> divided([0, 1, 2, 3, 4], made=sum, fits=lambda total: total < 4)
    [([0, 1], 1), ([2], 2), ([3], 3), ([4], 4)]

    ```
    """
    batch = made(rows)
    if len(rows) == 1 or fits(batch):
        return [(rows, batch)]
    middle = len(rows) // 2
    return divided(rows[:middle], made, fits) + divided(rows[middle:], made, fits)
