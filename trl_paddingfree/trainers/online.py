"""The base of the trainers that generate their own rows, which become flat where the model is called."""

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from datasets import Dataset

from .. import upstream
from ..data.rows import GeneratedRows, PromptGroups, by_prompt
from ..data.task import Task
from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..flat.counts import BatchCounts
from ..memory.plan import Plan
from ..model.flat_model import FlatModel
from .base import FlatTrainer
from .configs import Arguments
from .refusals import refuse_oversized, refuse_to_move
from .state import when_flat

# Of tasks that generate. Trainers give it their names, and the first of them what it is found by
PROMPTS = Task(
    name="prompts",
    unit="prompts",
    sequences=(("prompt_ids",),),
    collator=PromptGroups,
    prepare=upstream.prepare_prompts,
    truncates=False,
)
# Arguments of TRL's passes that are no part of the rows. All others hold images, or say which tokens stand for them
_PASS_OPTIONS = ("batch_size", "compute_entropy", "compute_aux_loss")


class OnlineTrainer(FlatTrainer):
    """
    Base of the trainers that generate completions and score them in several passes.

    Their batches come from no collator, so the models have a flattener: the passes of policy, old policy and reference
    become flat where each model is called, under whatever wrappers. Generation is untouched. The loss of a micro-batch
    is TRL's, over all its rows: what does not fit into a budget is divided beneath it.

    >>> from trl_paddingfree import PaddingFreeGRPOTrainer
    >>> [base.__name__ for base in PaddingFreeGRPOTrainer.__bases__]
    ['OnlineTrainer', 'GRPOTrainer']
    """

    # What TRL's trainers set
    pad_to_multiple_of: Any = None
    max_completion_length: int | None
    environment_factories: Any = None
    _tokenize_prompts: Callable[..., tuple[list[list[int]], ...]]
    _buffered_inputs: Any
    _step: int
    _generated: Inputs | None = None  # the rows of the last pass under a budget, which may have to be made again
    sample_unit = "completions"

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        config = arguments["args"]
        if self.flat.options.memory_budget == "auto" and config.use_vllm and config.vllm_mode == "colocate":
            raise ValueError(
                "`memory_budget='auto'` with `vllm_mode='colocate'` does not know what vLLM leaves: set the GiB that "
                "this process may use, with what vLLM holds."
            )

    # --- rows become flat -------------------------------------------------------------------------------------------

    def flatten(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> FlatBatch:
        """The flat batch of rows with prompts padded on the left and completions on the right."""
        rows = GeneratedRows.of(
            *(input_ids, attention_mask, labels),
            prefix_sharing=self.flat.trained.route.prefix_sharing,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        batch = rows.batch()
        if reach := self.reach_of(batch):
            batch = rows.batch(reach=reach)
        if torch.is_grad_enabled():  # the policy's pass, which trains
            self.counts.new.append(batch.counts)
        return batch.to(input_ids.device, non_blocking=True)

    def prove_placed(self, model: torch.nn.Module) -> None:
        if not self.flat.models:
            return
        super().prove_placed(model)
        flat_model = FlatModel.of(model)
        if flat_model is None:
            raise RuntimeError(
                f"Another trainer has replaced the forward of {type(self.flat_base(model)).__name__} since this "
                f"{type(self).__name__} was made: make it again."
            )
        flat_model.flattener = WeakMethod(self.flatten)  # models live on without their trainers

    @when_flat
    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        self.refuse_beside_rows([name for name, x in kwargs.items() if name not in _PASS_OPTIONS and x is not None])
        self.prove_placed(model)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    def refuse_beside_rows(self, names: list[str]) -> None:
        """Refuse what comes with the rows of a pass, by its names: only images do."""
        if names:
            raise ValueError(
                f"The rows come with `{names[0]}`: only SFT and DPO train on images without padding. Leave out "
                "images, also those that tools return, or set `padding_free=False`."
            )

    @when_flat
    def _generate_single_turn(self, *args, **kwargs):
        with self.flat.trained.attention_as_before():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    # --- budgets ----------------------------------------------------------------------------------------------------

    def refuse_small_budget(self, plan: Plan) -> None:
        """Refuse a budget that one row does not fit into, if its completion is as long as it may be."""
        if self.max_completion_length is None:
            return
        prompt, name = self.longest_row()
        row = [0] * (prompt + self.max_completion_length)
        if plan.limit is not None and plan.why_whole:
            refuse_oversized(plan.limit, len(row), name, plan.why_whole)
        batch = FlatBatch.from_rows([row], [[IGNORE_INDEX] * prompt + row[prompt:]], prefix_sharing=False)
        if plan.needs is not None and plan.least(batch) > plan.budget:
            raise plan.too_small_for(batch, name, "`max_completion_length`")

    def longest_row(self) -> tuple[int, str]:
        """Tokens of the longest prompt, by its characters, or 1 where none is known before; and what its row is."""
        data, prompt = self.train_dataset, 1
        if isinstance(data, Dataset) and "prompt" in data.column_names and not self.environment_factories:
            longest = max(data["prompt"], key=lambda prompt: len(str(prompt)))
            prompt = len(self._tokenize_prompts([longest])[0][0])
        limit = f"`max_completion_length={self.max_completion_length}`"
        return prompt, f"a prompt of {prompt} tokens with a completion of {limit}"

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        masks = [inputs["prompt_mask"], inputs["completion_mask"]]
        slots, real = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
        return BatchCounts(slots, real, slots, 0)

    # --- which rows share a micro-batch -----------------------------------------------------------------------------

    def refuse_micro_batches(self) -> None:
        options = self.flat.options
        if options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"`arrange_micro_batches='tokens'` needs rows of known length, and {self.trl_trainer.__name__} "
                "generates them: set 'prefix', which brings the rows of one prompt together, or 'none'."
            )
        refuse_to_move(options, self.coupled_by())

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches whose rows are generated together."""
        return self.args.steps_per_generation

    @when_flat
    def _prepare_inputs(self, generation_batch):
        steps = self.flat.steps
        if steps is not None and steps.is_again and self.model.training:
            return self._generated
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.flat.options.arrange_micro_batches != "none" and self._buffered_inputs is not before:
            number = self.steps_per_generation
            window = math.gcd(self.args.gradient_accumulation_steps, number)  # these share each optimizer step
            windows = [self._buffered_inputs[first : first + window] for first in range(0, number, window)]
            self._buffered_inputs = [batch for each in windows for batch in by_prompt(each)]
            inputs = self._buffered_inputs[self._step % number]
        if steps is not None and self.model.training:
            self._generated = inputs
            steps.remember()  # what generation has changed is not taken back
        return inputs
