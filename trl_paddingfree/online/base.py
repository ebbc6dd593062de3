"""Base of the trainers that generate their own rows, which become flat when the model is called."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..core import upstream
from ..core.data.lengths import column_names
from ..core.data.task import Task
from ..core.flat.batch import FlatBatch, Inputs, Make
from ..core.flat.counts import BatchCounts
from ..core.model.flat_model import FlatModel, Flattener
from ..core.model.restored import attributes_set
from ..core.trainers.base import FlatTrainer
from ..core.trainers.refusals import is_ours
from ..core.trainers.runtime import when_flat
from .rewards import checked
from .rows import PromptGroups, generated_on_host

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
    sample_unit = "completions"
    trains_language_models = True

    @property
    def knows_prompts(self) -> bool:
        """Whether the training data has the prompts, and nothing of the user's makes or changes them in training."""
        if self.train_dataset is None or self.environment_factories or vars(self).get("rollout_func"):
            return False
        # What a method of the user's needs may be made after the trainer
        return "prompt" in column_names(self.train_dataset) and is_ours(type(self), "_tokenize_prompts")

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
        reach = self.runtime.reach_of(input_ids.size(1))
        batch = make(
            *generated_on_host(input_ids, attention_mask, labels),
            prefix_sharing=self.runtime.trained.route.prefix_sharing,
            pad_to_multiple_of=self.pad_to_multiple_of,
            reach=reach,
        )
        if torch.is_grad_enabled():  # the policy's pass
            self.runtime.counts.new.append(batch.counts)
        return batch.to(input_ids.device, non_blocking=True)

    def flattener(self, inputs: Inputs) -> Flattener:
        """How rows become flat in a pass with these `inputs`, whose rows the model may get in several calls."""
        return self.flatten

    def rows_of_call(
        self, flat_model: FlatModel, args: tuple[Any, ...], kwargs: Inputs
    ) -> tuple[Inputs, FlatBatch] | None:
        return super().rows_of_call(flat_model, args, kwargs) or flat_model.flattened(args, kwargs)

    def beside_rows(self, inputs: Inputs) -> Inputs:
        """The `inputs` of a pass that the model gets beside its rows."""
        return {}

    @when_flat
    def compute_loss(self, *args, **kwargs):
        with ExitStack() as passes:  # user-defined losses may call the models themselves
            for flat_model in self.runtime.models:
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
        self.prove(model)
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
        with self.runtime.trained.attention_as_before():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        return BatchCounts(mask.numel(), int(mask.sum()), mask.numel())
