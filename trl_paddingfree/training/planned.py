"""Plans memory once weights are materialized."""

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..memory.device import PeakMemory
from ..memory.engine import is_sharded
from ..memory.needs import HeadBytes, fused_head
from ..memory.planner import MemoryPlanner
from ..memory.planning import make_planner
from ..model import architecture
from .groups import GroupedTrainer
from .steps import TrainingSteps


class PlannedTrainer(GroupedTrainer):
    """A trainer with a memory planner, if its options ask for a budget."""

    head_bytes: ClassVar[Callable[..., HeadBytes]] = staticmethod(fused_head)  # what the head needs, by the models
    model: PreTrainedModel
    aux_loss_enabled: bool = False
    flat_models: Callable[[], list[torch.nn.Module]]
    prove_placed: Callable[[torch.nn.Module], None]

    @cached_property
    def peak_memory(self) -> PeakMemory:
        """Measures the most memory in use on the device so far."""
        return PeakMemory(self.accelerator.device)

    def plan_if_placed(self) -> None:
        """Plan for the budgets before training, if the models have all of their weights by now."""
        if not self.flat.check.awaits_weights and not is_sharded(self.accelerator):
            self.plan_steps(self.model)

    def plan_steps(self, model: torch.nn.Module) -> None:
        """
        Prove a `model`, if its weights came late; then plan for budgets, prove slices, and refuse a budget that an
        example does not fit into. Does nothing if called again.
        """
        self.prove_placed(model)
        flat = self.flat
        if flat.is_planned:
            return
        if not flat.options.has_budget:
            flat.is_planned = True
            return
        if vars(self).get("is_distributed_loading_by_transformers"):  # not all versions of transformers do that
            raise ValueError(
                "`distributed_config` shards the model as it is loaded, and budgets know of accelerate's engines only: "
                "leave `memory_budget` and `max_tokens_per_micro_batch` out, or shard with FSDP2 of accelerate."
            )
        planner = self._planner()
        flat.check.prove_slices([model, *self.flat_models()[1:]])
        if flat.resumed_from is not None:
            planner.restore(flat.resumed_from, self.args.process_index)
        if not planner.has_shrunk:  # else its limit is smaller than the one by which the data was measured before
            self.refuse_small_budget(planner)
        # All at once, and last: after an error on the way, the next step plans again
        flat.planner, flat.steps, flat.is_planned = planner, TrainingSteps(self, planner), True

    def _planner(self) -> MemoryPlanner:
        """The planner for the budgets that the options ask for, of models that have their weights."""
        options, args, optimizer = self.flat.options, self.args, self.optimizer
        with self.flat.check.in_precision():
            return make_planner(
                self.flat.trained,
                self.accelerator,
                self.peak_memory,
                option=options.memory_budget,
                limit=options.max_tokens_per_micro_batch,
                is_reentrant=bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
                models=self.flat_models(),
                wrapped=self.model_wrapped,
                optimizer=self.get_optimizer_cls_and_kwargs(args, self.model) if optimizer is None else optimizer,
                head=type(self).head_bytes(*(flat_model.model for flat_model in self.flat.models)),
                images=self.images_in_memory() if options.memory_budget else (),
                arguments={"output_router_logits": True} if self.aux_loss_enabled else {},
            )

    def refuse_small_budget(self, planner: MemoryPlanner) -> None:
        """Refuse a budget that an example, of those that are known, does not fit into."""
        raise NotImplementedError

    def images_in_memory(self) -> list[Inputs]:
        """Arguments of calls with different numbers of images, from which the planner learns what one needs."""
        images = self.flat.check.images
        if images is not None and not images.names:
            raise ValueError(
                f"`memory_budget={self.flat.options.memory_budget}`: no example of the train data has an image in its "
                "column, so what the vision tower keeps is not known. Remove the column, or leave `memory_budget` out."
            )
        return [] if images is None else images.to_count(self.flat.trained.route.prefix_sharing)

    def reach_of(self, batch: FlatBatch) -> int | None:
        """The length of a batch's longest row, if rotary frequencies of a model depend on it; else `None`."""
        return architecture.rotary_reach(batch.row_index.size(1), *self._text_configs())

    def rotary_limits(self) -> dict[str, int]:
        """By kind of rotary frequencies: the length from which on those of a model depend on the longest row."""
        return architecture.rotary_limits(*self._text_configs())

    def _text_configs(self) -> list[PreTrainedConfig]:
        return [flat_model.model.config.get_text_config() for flat_model in self.flat.models]
