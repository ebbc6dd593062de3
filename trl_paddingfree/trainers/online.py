"""The base of the trainers that generate their own rows, which become flat where the model is called."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from datasets import Dataset
from trl.trainer.utils import split_tensor_dict

from ..flat.batch import IGNORE_INDEX, FlatBatch, RowPart, row_spans
from ..flat.counts import BatchCounts
from ..memory.parts import split_in_order
from ..memory.plan import MemoryBudget
from ..model.flat_model import FlatModel
from .base import FlatTrainer
from .refusals import refuse_oversized, refuse_to_move

# Arguments of TRL's passes that are no part of the rows. All others hold images, or say which tokens stand for them
_PASS_OPTIONS = ("batch_size", "compute_entropy", "compute_aux_loss")


class OnlineTrainer(FlatTrainer):
    """
    Base of the trainers that generate completions and score them in several passes.

    Their batches come from no collator, so the models have a flattener: the passes of policy, old policy and reference
    become flat where each model is called, under whatever wrappers. Generation is untouched. The loss of a micro-batch
    is TRL's, over all its rows: what does not fit into a budget is divided beneath it.
    """

    smallest_part = ("a row", "`max_completion_length`")
    # What TRL's trainers set
    pad_to_multiple_of: Any = None
    max_completion_length: Any
    environment_factories: Any = None
    _tokenize_prompts: Any
    _buffered_inputs: Any
    _step: int
    attempted: Any = None  # rows of a pass that trains, while it may have to be made again
    sample_unit = "completions"

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        super().refuse_arguments(arguments)
        config = arguments["args"]
        if self.flat.options.memory_budget == "auto" and config.use_vllm and config.vllm_mode == "colocate":
            raise ValueError(
                "`memory_budget='auto'` with `vllm_mode='colocate'` does not know what vLLM leaves: set the GiB that "
                "this process may use, with what vLLM holds."
            )

    # --- rows become flat -------------------------------------------------------------------------------------------

    def flatten(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> FlatBatch:
        """The flat batch of rows with prompts padded on the left and completions on the right, in parts that fit."""
        # One copy: each waits for the device
        ids, mask, targets = torch.stack([input_ids, attention_mask.long(), labels]).cpu()
        starts, lengths = row_spans(mask)
        firsts = targets.gather(1, torch.tensor(starts)[:, None])[:, 0]
        for row, start in enumerate(starts):
            if start and lengths[row] and firsts[row] != IGNORE_INDEX:
                raise ValueError(
                    f"Row {row} has a completion and no prompt: TRL would predict its first token from padding. Leave "
                    "out empty prompts, or set `padding_free=False`."
                )
        sharing = self.flat.models[0].route.prefix_sharing
        make = partial(FlatBatch.from_padded, prefix_sharing=sharing, pad_to_multiple_of=self.pad_to_multiple_of)
        batch = make(ids, targets, lengths, starts)
        if reach := self.reach_of(batch):
            batch = make(ids, targets, lengths, starts, reach=reach)
        if torch.is_grad_enabled():  # the policy's pass, which trains
            options = self.flat.options
            if options.refuses_oversized:
                refuse_oversized(options.max_tokens_per_micro_batch, max(lengths), *self.smallest_part)
            if self.flat.steps is not None:
                in_prompt = mask.bool() & (targets == IGNORE_INDEX)
                prompts = [row[chosen].numpy().tobytes() for row, chosen in zip(ids, in_prompt, strict=True)]
                order = sorted(range(len(prompts)), key=prompts.__getitem__)

                def part(items: list[int]) -> RowPart:
                    rows = [order[item] for item in items]
                    spans = [lengths[row] for row in rows], [starts[row] for row in rows]
                    return RowPart(torch.tensor(rows), make(ids[rows], targets[rows], *spans, reach=reach))

                tokens = [lengths[row] for row in order]
                batch = self.flat.steps.divided(batch, tokens, part, split_in_order)
            self.counts.add(batch.counts.in_parts([each.batch.counts for each in batch.parts]))
        return batch.to(input_ids.device, non_blocking=True)

    def prove_placed(self, model: Any) -> None:
        if self.flat is None or self.flat.check is None:
            return
        super().prove_placed(model)
        flat_model = FlatModel.of(model)
        assert flat_model is not None
        flat_model.flattener = WeakMethod(self.flatten)  # models live on without their trainers

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        beside = [name for name, value in kwargs.items() if name not in _PASS_OPTIONS and value is not None]
        if self.flat is not None and beside:
            raise ValueError(
                f"The rows come with `{beside[0]}`: only SFT and DPO train on images without padding. Leave out "
                "images, also those that tools return, or set `padding_free=False`."
            )
        self.prove_placed(model)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    def _generate_single_turn(self, *args, **kwargs):
        with nullcontext() if self.flat is None else self.flat.models[0].attention_as_before():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    # --- budgets ----------------------------------------------------------------------------------------------------

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that one row does not fit into, if its completion is as long as it may be."""
        if self.max_completion_length is None:
            return
        prompt, name = self.longest_row()
        row = [0] * (prompt + self.max_completion_length)
        batch = FlatBatch.from_rows([row], [[IGNORE_INDEX] * prompt + row[prompt:]], prefix_sharing=False)
        beside = self.flat.steps.beside if self.args.per_device_train_batch_size > 1 else 0
        if not memory.can_hold(batch, beside):
            raise memory.too_small_for(batch, name, self.smallest_part[1], beside)

    def longest_row(self) -> tuple[int, str]:
        """Tokens of the longest prompt, by its characters, or 1 where none is known before; and what its row is."""
        data, prompt = self.train_dataset, 1
        if isinstance(data, Dataset) and "prompt" in data.column_names and not self.environment_factories:
            longest = max(data["prompt"], key=lambda prompt: len(str(prompt)))
            prompt = len(self._tokenize_prompts([longest])[0][0])
        limit = f"`max_completion_length={self.max_completion_length}`"
        return prompt, f"a prompt of {prompt} tokens with a completion of {limit}"

    def training_step(self, model, inputs, num_items_in_batch=None):
        step = super().training_step
        self.prove_placed(model)  # if it still had to wait for the weights, so had the plan
        self.plan_steps()
        if self.flat is None or self.flat.steps is None:
            return step(model, inputs, num_items_in_batch)
        try:
            return self.flat.steps.beneath(lambda: step(model, inputs, num_items_in_batch))
        finally:
            self.attempted = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.flat is None and self.model.training:
            masks = [inputs["prompt_mask"], inputs["completion_mask"]]
            slots, real = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
            self.counts.add(BatchCounts(slots, real, slots, 0))
        if self.flat is not None and self.flat.steps is not None and self.model.training:
            self.flat.steps.begin()
            self.attempted = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    # --- which rows share a micro-batch -----------------------------------------------------------------------------

    def refuse_micro_batches(self) -> None:
        options, most = self.flat.options, self.max_completion_length
        if options.refuses_oversized and most is not None:
            prompt, name = self.longest_row()
            refuse_oversized(options.max_tokens_per_micro_batch, prompt + most, name, self.smallest_part[1])
        if options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"`arrange_micro_batches='tokens'` needs rows of known length, and {self.trl_trainer.__name__} "
                "generates them: set 'prefix', which brings the rows of one prompt together, or 'none'."
            )
        refuse_to_move(options, self.coupled_by())

    def _prepare_inputs(self, generation_batch):
        if self.attempted is not None:  # the same rows again
            return self.attempted
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.flat is None or self.flat.options.arrange_micro_batches == "none" or self._buffered_inputs is before:
            return inputs
        steps = self.args.steps_per_generation
        window = math.gcd(self.args.gradient_accumulation_steps, steps)  # these share each optimizer step
        batches = self._buffered_inputs
        windows = [batches[first : first + window] for first in range(0, steps, window)]
        self._buffered_inputs = [batch for each in windows for batch in by_prompt(each)]
        return self._buffered_inputs[self._step % steps]


def by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The rows of some micro-batches of one width, those of one prompt together, in micro-batches of the same size. As TRL
    keeps them, these hold tensors and lists of one entry per row, and values that all rows have in common.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = [row.tobytes() for row in whole["prompt_ids"].cpu().numpy()]
    order = sorted(range(len(prompts)), key=prompts.__getitem__)

    def ordered(value):
        if isinstance(value, torch.Tensor) and value.ndim:
            return value[order]
        return [value[row] for row in order] if isinstance(value, list) else value

    return split_tensor_dict({name: ordered(value) for name, value in whole.items()}, len(batches))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].ndim:
        return torch.cat(values)
    return [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]
