"""Base of the trainers that generate their own rows, which become flat when the model is called."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..core import upstream
from ..core.data.rows import Make, PromptGroups, generated_on_host
from ..core.data.task import Task
from ..core.flat.batch import FlatBatch, Inputs
from ..core.flat.counts import BatchCounts
from ..core.model.flat_model import FlatModel, Flattener
from ..core.model.restored import attributes_set
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.refusals import is_ours, refuse_to_move
from ..core.trainers.runtime import when_flat
from ..coupling import own_steps
from .order import by_prompt
from .rewards import checked

# What tasks that generate share. Each adds its name; GRPO, the first, also the columns by which data is recognized
PROMPTS = Task(
    name="prompts",
    unit="prompts",
    sequences=(("prompt_ids",),),
    collator=PromptGroups,
    prepare=upstream.prepare_prompts,
    truncates=False,
)


class Online(FlatTrainer):
    """
    Base of the trainers that generate completions and score them in several passes.

    There is no collator: rows become flat when policy, old policy and reference are called, whatever wraps these
    models. Generation is untouched. The loss of a micro-batch is TRL's, over all its rows.

    >>> from trl_paddingfree import PaddingFreeGRPOTrainer
    >>> [base.__name__ for base in PaddingFreeGRPOTrainer.__bases__]
    ['OnlineTrainer', 'GRPOTrainer']
    """

    # Set by TRL's trainers
    pad_to_multiple_of: Any = None
    max_completion_length: int | None
    environment_factories: Any = None
    _tokenize_prompts: Callable[..., tuple[list[list[int]], ...]]
    _buffered_inputs: Any
    _step: int
    sample_unit = "completions"

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        self._refuse_lengths()
        if self.flat.options.arrange_micro_batches != "none" and is_ours(type(self), "coupled_by"):
            refuse_to_move(self.flat.options, self.coupled_by_arguments(arguments))

    # --- rows become flat -------------------------------------------------------------------------------------------

    def flatten(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        make: Make = FlatBatch.from_padded,
    ) -> FlatBatch:
        """
        Flatten `(R, L)` rows, with prompts padded on the left and completions on the right. If gradients are enabled,
        they count as trained. `make` makes the flat batch.
        """
        reach = self.flat.reach_of(input_ids.size(1))
        batch = make(
            *generated_on_host(input_ids, attention_mask, labels),
            prefix_sharing=self.flat.trained.route.prefix_sharing,
            pad_to_multiple_of=self.pad_to_multiple_of,
            reach=reach,
        )
        if torch.is_grad_enabled():  # the policy's pass
            self.flat.counts.new.append(batch.counts)
        return batch.to(input_ids.device, non_blocking=True)

    def flattener(self, inputs: Inputs) -> Flattener:
        """How rows become flat in a pass with these `inputs`, whose rows the model may get in several calls."""
        return self.flatten

    def beside_rows(self, inputs: Inputs) -> Inputs:
        """The `inputs` of a pass that the model gets beside its rows."""
        return {}

    @when_flat
    def compute_loss(self, *args, **kwargs):
        with ExitStack() as passes:  # user-defined losses may call the models themselves
            for flat_model in self.flat.models:
                passes.enter_context(flat_model.flattening(self.flatten))
            return super().compute_loss(*args, **kwargs)

    def forward_replaced(self, model: torch.nn.Module) -> RuntimeError:
        """The error for a model that no longer computes flat batches."""
        return RuntimeError(
            f"The forward of {type(self.flat_base(model)).__name__} was replaced after this {type(self).__name__} "
            "was made, for example by another trainer: make the trainer again."
        )

    @when_flat
    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        self.flat.prove(self, model)
        if (flat_model := FlatModel.of(model)) is None:
            raise self.forward_replaced(model)
        with flat_model.flattening(self.flattener(kwargs)):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    @when_flat
    def _calculate_rewards(self, *args, **kwargs):
        functions = [*map(checked, vars(self)["reward_funcs"], vars(self)["reward_func_names"])]
        with attributes_set([(self, "reward_funcs", functions)]):
            return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    @when_flat
    def _generate_single_turn(self, *args, **kwargs):
        with self.flat.trained.attention_as_before():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        return BatchCounts(mask.numel(), int(mask.sum()), mask.numel())

    # --- which rows share a micro-batch -----------------------------------------------------------------------------

    def _refuse_lengths(self) -> None:
        if self.flat.options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"`arrange_micro_batches='tokens'` needs rows of known length, and {self.trl_trainer.__name__} "
                "generates them: set 'prefix', which brings the rows of one prompt together, or 'none'."
            )

    def refuse_options(self) -> None:
        options = self.flat.options
        self._refuse_lengths()
        if options.arrange_micro_batches != "none":
            owners = [cls for cls in type(self).__mro__ if "trl_trainer" in vars(cls)]
            refuse_to_move(options, [*self.coupled_by(), *own_steps(self, owners, moves=True)])

    def split_by_row(self, batch: Inputs) -> Inputs:
        """A batch in which arguments with several entries per row are lists of one tensor per row."""
        return batch

    def kinds_of(self, rows: Inputs) -> Sequence[int]:
        """What tells rows apart beside their prompts, a number for each row."""
        return [0] * len(rows["prompt_ids"])

    @property
    def steps_per_generation(self) -> int:
        """How many micro-batches are generated together."""
        return self.args.steps_per_generation

    @when_flat
    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.flat.options.arrange_micro_batches != "none" and self.model.training:
            self.refuse_options()  # callbacks may have changed the loss
            if self._buffered_inputs is not before:
                number = self.steps_per_generation
                size = math.gcd(self.args.gradient_accumulation_steps, number)  # micro-batches of one optimizer step
                groups = (self._buffered_inputs[first : first + size] for first in range(0, number, size))
                arranged = (by_prompt(group, self.split_by_row, self.kinds_of) for group in groups)
                self._buffered_inputs = [batch for group in arranged for batch in group]
                inputs = self._buffered_inputs[self._step % number]
        return inputs
