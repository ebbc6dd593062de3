"""The base of the trainers that generate their own rows, which become flat where the model is called."""

import math
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from trl.trainer.utils import split_tensor_dict

from ..flat.batch import IGNORE_INDEX, FlatBatch, RowPart, row_spans
from ..flat.counts import BatchCounts
from ..memory.parts import split_in_order
from ..memory.plan import MemoryBudget
from ..memory.steps import counts_in_parts
from ..model.flat_model import FlatModel
from .base import FlatTrainer

# Arguments of TRL's passes that are no part of the rows. All others hold images, or say which tokens stand for them
_PASS_OPTIONS = ("batch_size", "compute_entropy", "compute_aux_loss")


class OnlineTrainer(FlatTrainer):
    """
    Base of the trainers that generate completions and score them in several passes.

    Their batches come from no collator, so the models have a flattener: the passes of policy, old policy and reference
    become flat where each model is called, under whatever wrappers. Generation is untouched. The loss of a micro-batch
    is TRL's, over all its rows: what does not fit into a memory budget is divided beneath it.
    """

    # What TRL's trainers set
    pad_to_multiple_of: Any = None
    max_completion_length: Any
    environment_factories: Any = None
    _tokenize_prompts: Any
    _buffered_inputs: Any
    _step: int
    attempted: Any = None  # rows of a pass that trains, while it may have to be made again

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        super().refuse_arguments(arguments)
        config = arguments["args"]
        if self.flat.options.memory_budget == "auto" and config.use_vllm and config.vllm_mode == "colocate":
            raise ValueError(
                "`memory_budget='auto'` with `vllm_mode='colocate'` does not know what vLLM leaves: set the GiB that "
                "training may use."
            )

    # --- rows become flat -------------------------------------------------------------------------------------------

    def flatten(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> FlatBatch:
        """
        The flat batch of rows whose prompts are padded on the left and completions on the right.

        Of rows that do not fit into the memory budget, with the parts in which they do.
        """
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
        make = partial(
            FlatBatch.from_padded,
            prefix_sharing=self.flat.models[0].route.prefix_sharing,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        batch = make(ids, targets, lengths, starts)
        if reach := self.reach_of(batch):
            batch = make(ids, targets, lengths, starts, reach=reach)
        if torch.is_grad_enabled():  # the policy's pass, which trains
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
            self.counts.add(counts_in_parts(batch.counts, [each.batch for each in batch.parts]))
        return batch.to(input_ids.device, non_blocking=True)

    def prove_placed(self, model: Any) -> None:
        if self.flat is None or self.flat.check is None:
            return
        if self.flat.check.awaits_weights:  # the check compares with rows
            for flat_model in self.flat.models:
                flat_model.flattener = None
        super().prove_placed(model)
        flat_model = FlatModel.of(model)
        assert flat_model is not None
        flat_model.flattener = self.flatten

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        beside = [name for name, value in kwargs.items() if name not in _PASS_OPTIONS and value is not None]
        if self.flat is not None and beside:
            raise ValueError(
                f"The rows come with `{beside[0]}`: only SFT and DPO train on images without padding. Leave out "
                "images, also those that tools return, or set `padding_free=False`."
            )
        self.prove_placed(model)
        trl: Any = super()
        return trl._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        trl: Any = super()
        if self.flat is None:
            return trl._generate_single_turn(*args, **kwargs)
        with self.flat.models[0].attention_as_before():
            return trl._generate_single_turn(*args, **kwargs)

    # --- a memory budget --------------------------------------------------------------------------------------------

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that one row does not fit into, if its completion is as long as it may be."""
        prompt, completion = self.longest_prompt(), self.max_completion_length
        if completion is None:
            return
        row = [0] * (prompt + completion)
        batch = FlatBatch.from_rows([row], [[IGNORE_INDEX] * prompt + row[prompt:]], prefix_sharing=False)
        beside = self.flat.steps.beside if self.args.per_device_train_batch_size > 1 else 0
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

    def example_of(self, batch: FlatBatch) -> tuple[str, str]:
        """What a part that does not fit by itself is called, and what makes it smaller."""
        return f"a row of {batch.counts.real} tokens", "`max_completion_length`"

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

    def coupled_by(self) -> list[str]:
        """Options under which a row's loss depends on which others share its micro-batch."""
        return ["a router loss"] if self.aux_loss_enabled else []

    def refuse_micro_batches(self) -> None:
        options = self.flat.options
        if options.max_tokens_per_micro_batch is not None:
            raise ValueError(
                f"`max_tokens_per_micro_batch={options.max_tokens_per_micro_batch}`: {self.trl_trainer.__name__} knows "
                "its rows only once they are generated, and takes them in micro-batches of "
                "`per_device_train_batch_size`. Lower that, and raise `gradient_accumulation_steps`."
            )
        arranging = f"`arrange_micro_batches={options.arrange_micro_batches!r}`"
        if options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"{arranging} needs rows of known length, and {self.trl_trainer.__name__} generates them: set "
                "'prefix', which brings the rows of one prompt together, or 'none'."
            )
        if options.arrange_micro_batches == "prefix" and (reasons := self.coupled_by()):
            raise ValueError(
                f"{arranging} changes which rows share a micro-batch, and with {', '.join(reasons)} the loss of a row "
                "depends on the others: leave one of them out."
            )

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

    @property
    def sample_unit(self) -> str:
        return "completions"


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
