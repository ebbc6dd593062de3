"""What the trainers whose batches come from a collator add to TRL's: flat batches, within a budget."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import DistributedType
from datasets import Dataset

from .. import upstream
from ..batching.lengths import longest_row, token_lengths
from ..data.image_probe import ImageProbe
from ..data.images import has_images
from ..data.parts import KeepingExamples
from ..flat.batch import BatchCounts
from ..model.answers import EditedRowsError, refuse_lost_batch
from ..model.forward import ask_edits, read_edits
from .base import FlatTrainer
from .budgeted import BudgetedSteps
from .micro_batches import Part, PartMetrics, arranged_sampler, arrangement, weighted_parts
from .refusals import (
    refuse_moving,
    refuse_oversized,
    refuse_rotary_padding,
    refuse_unseen,
    refuse_unsized,
)
from .vision import flat_collator, images_to_try


class CollatedTrainer(BudgetedSteps, FlatTrainer):
    """
    Base of the trainers whose batches come from a collator: it makes them flat, and this keeps them within a budget.

    It is mixed in before one of TRL's trainers.

    Examples:
    ```python
    >>> from trl_paddingfree import PaddingFreeDPOTrainer
    >>> [base.__name__ for base in PaddingFreeDPOTrainer.__bases__]
    ['CollatedTrainer', 'DPOTrainer']

    ```
    """

    data_collator: Any
    # Metrics that are no means over what a micro-batch holds: `min` or `max` over it, or differences of two others
    extremes: ClassVar[dict[str, Callable[..., float]]] = {}
    differences: ClassVar[dict[str, tuple[str, str]]] = {}
    # What TRL's trainers set
    _train_batch_size: int
    _total_train_tokens: int
    _is_vision_dataset: Any = False
    aux_loss_enabled: Any = False
    router_aux_loss_coef: Any = 0.0

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        super().refuse_arguments(arguments)
        assert self.flat is not None
        if has_images(arguments.get("train_dataset")):
            refuse_unseen(self.flat.options)

    def start_flat(self) -> None:
        """Prove the models, and have the collator make flat batches. Once."""
        if self.flat is None or self.flat.route is not None:
            return
        super().start_flat()
        assert self.flat.route is not None
        self.data_collator = replace(flat_collator(self), prefix_sharing=self.flat.route.prefix_sharing)

    def images_to_try(self) -> ImageProbe | None:
        """The first examples with images, as the collator will get them; `None` for text."""
        return images_to_try(self, flat_collator(self))

    def images_in_memory(self) -> list[dict[str, Any]]:
        assert self.flat is not None
        assert self.flat.check is not None
        images = self.flat.check.images
        if images is not None and not images.names:
            raise ValueError(
                f"`memory_budget={self.flat.options.memory_budget}`: the first examples have no images, so what the "
                "vision tower keeps of those that follow is not known. Shuffle the data, or leave `memory_budget` out."
            )
        return [] if images is None else images.to_count(self.data_collator.prefix_sharing)

    # --- which examples share a micro-batch -------------------------------------------------------------------------

    def coupled_by(self) -> list[str]:
        """Options under which an example's loss depends on which others share its micro-batch."""
        aux_loss = [f"`router_aux_loss_coef={self.router_aux_loss_coef}`"] if self.aux_loss_enabled else []
        limits = self.rotary_limits().items()
        reached = [f"`rope_type={kind!r}` and rows of more than {n} tokens" for kind, n in limits if self.exceeds(n)]
        return [*aux_loss, *reached]

    def rotary_limits(self) -> dict[str, int]:
        """Kinds of rotary frequencies that follow the longest row, with the length from which on they do."""
        return upstream.rotary_limits(self.flat_base(self.model).config.get_text_config())

    def exceeds(self, length: int) -> bool:
        """Whether a row of training may be longer than `length`."""
        limit = self.args.max_length
        if not isinstance(self.train_dataset, Dataset) or self._is_vision_dataset:
            return limit is None or limit > length
        return longest_row(self.example_lengths()) > length

    def weighed_by_micro_batch(self) -> list[str]:
        """Options under which the weight of an example in a step depends on its micro-batch, or on its process."""
        return []

    def example_lengths(self) -> np.ndarray:
        """
        Lengths of what each training example holds, after truncation.

        Returns:
            `np.ndarray` of shape `(examples, 1 + completions)` or `(examples, 1)`, int64: tokens of the prompt and of
            each completion; or of each row.
        """
        return token_lengths(self.train_dataset, self.task.token_columns)

    def refuse_micro_batches(self) -> None:
        """Refuse options that move examples between micro-batches where that would change the loss."""
        if self.flat is None or self.flat.route is None:
            return
        options = self.flat.options
        refuse_unsized(self, options, knows_sizes=type(self).part_sizes is not CollatedTrainer.part_sizes)
        limit = options.max_tokens_per_micro_batch
        if options.arrange_micro_batches != "none" or limit:
            refuse_moving(options, self.train_dataset, self.args, self.coupled_by(), self.weighed_by_micro_batch())
        refuse_rotary_padding(self.args.pad_to_multiple_of, self.rotary_limits(), self.exceeds)
        if limit and options.oversized_examples == "error" and isinstance(self.train_dataset, Dataset):
            refuse_oversized(self.example_lengths(), self.flat.route.prefix_sharing, limit)

    def _get_train_sampler(self, *args, **kwargs):
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        flat = self.flat
        if flat is None or flat.route is None or flat.options.arrange_micro_batches == "none":
            return sampler
        # `auto_find_batch_size` leaves the size in `args` as it was
        batch_size, processes = self._train_batch_size, self.accelerator.num_processes
        arrange = arrangement(
            flat.options.arrange_micro_batches,
            self.train_dataset,
            self.example_lengths(),
            prefix_column=self.task.token_columns[0],
            prefix_sharing=flat.route.prefix_sharing,
            hidden_size=self.model.config.get_text_config().hidden_size,
            batch_size=batch_size,
            num_processes=processes,
        )
        step_size = batch_size * processes * self.args.gradient_accumulation_steps
        flat.sampler = arranged_sampler(
            sampler,
            arrange,
            step_size=step_size,
            data_seed=self.args.data_seed,
            use_seedable_sampler=self.args.accelerator_config.use_seedable_sampler,
        )
        return flat.sampler

    def get_train_dataloader(self):
        if self.flat is None:
            return super().get_train_dataloader()
        collator = self.data_collator
        if limit := self.flat.options.max_tokens_per_micro_batch:
            # In training only: evaluation keeps no activations and needs no parts
            self.data_collator = replace(collator, max_tokens=limit)
        if self.flat.options.memory_budget is not None:
            self.data_collator = KeepingExamples(collator)
        try:
            loader: Any = super().get_train_dataloader()
        finally:
            self.data_collator = collator
        if self.flat.sampler is not None:
            # accelerate finds its own samplers only: a run that several processes resume would go on at epoch 0
            loader.set_sampler(self.flat.sampler)
        return loader

    # --- a micro-batch, whole or in parts ---------------------------------------------------------------------------

    def part_sizes(self, inputs: dict[str, Any]) -> dict[str, int]:
        """What the loss, under the name "loss", and each metric of a part of a micro-batch is a mean over: how many."""
        raise NotImplementedError

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.flat is not None and self.flat.options.memory_budget is not None:
            self.prove_placed(model)  # if it still had to wait for the weights, so had the plan
            self.plan_memory()
        if self.flat is not None:
            refuse_lost_batch(inputs)
        batches = self.parts_of(inputs)
        if batches[0] is not inputs:
            self._refuse_edits_of_whole(inputs, batches)
        most, number = len(batches), None
        if self.flat is not None and (self.flat.options.max_tokens_per_micro_batch or self.flat.memory):
            most, number = self.agree_on_parts(batches)
        if most == 1:
            self._count(inputs, batches)
            return self.attempt(model, inputs, num_items_in_batch, number)
        is_normalized = num_items_in_batch is not None
        parts = weighted_parts(batches, self.part_sizes, num_wanted=most, is_normalized=is_normalized)
        self._count(inputs, [part.inputs for part in parts])
        metrics = PartMetrics(self)
        losses = [self.attempt(model, part.inputs, num_items_in_batch, number, (part, metrics)) for part in parts]
        metrics.log()
        return torch.stack(losses).sum()

    def _refuse_edits_of_whole(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Refuse edits of the rows of a micro-batch that runs in parts: no call of the model will see them."""
        if self.flat is not None and self.flat.bases:
            rows = {**inputs, "labels": self.data_collator.row_labels(inputs)}
            ask_edits(self.flat.bases[0], inputs["flat_batch"], rows)
        whole, sizes = self.part_sizes(inputs), [self.part_sizes(part) for part in parts]
        if any(size != sum(part[name] for part in sizes) for name, size in whole.items()):
            raise EditedRowsError(
                "Fewer tokens of a batch are scored than of the parts that it was cut into, which are computed: edit "
                "the examples before `super().torch_call(examples)` of this package's collator, or leave "
                "`max_tokens_per_micro_batch` and `memory_budget` out."
            )

    def step_of_part(self, model, part: Part, metrics: PartMetrics, num_items_in_batch) -> torch.Tensor:
        """Forward and backward pass of a part; gradients are synchronized after the last."""
        assert self.flat is not None
        state, sync_gradients = self.accelerator.gradient_state, self.accelerator.sync_gradients
        # DeepSpeed goes by the flag below, and has a `no_sync` that refuses some of its stages
        holds = part.is_last or self.accelerator.distributed_type == DistributedType.DEEPSPEED
        state._set_sync_gradients(sync_gradients and part.is_last)
        self.flat.part = part, metrics
        try:
            with nullcontext() if holds else self.accelerator.no_sync(model):
                return super().training_step(model, part.inputs, num_items_in_batch)
        finally:
            self.flat.part = None
            state._set_sync_gradients(sync_gradients)

    def compute_loss_context_manager(self):
        stack: Any = super().compute_loss_context_manager()
        if self.flat is not None and self.flat.part is not None:
            part, metrics = self.flat.part
            stack.enter_context(metrics.of(part))
        return stack

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.prove_placed(model)
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        # The device has answered: TRL has read its metrics
        for base in [] if self.flat is None else self.flat.bases:
            read_edits(base)
        if self.flat is None or self.flat.part is None:
            return loss
        weight = self.flat.part[0].weight
        return (weight * loss[0], *loss[1:]) if isinstance(loss, tuple) else weight * loss

    # --- figures ----------------------------------------------------------------------------------------------------

    def _count(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Add the counts of a micro-batch, which is computed in `parts`."""
        if self.flat is None:
            slots = inputs["input_ids"].numel()
            self.counts.add(BatchCounts(slots, 0, slots, 0))
        else:
            computed = sum((part["flat_batch"].counts for part in parts), BatchCounts())
            whole = inputs["flat_batch"].counts
            self.counts.add(replace(whole, computed=computed.computed, repeated=computed.repeated))

    def total_counts(self) -> BatchCounts:
        total = super().total_counts()
        if self.flat is None:  # TRL counts the real tokens of padded batches
            total = replace(total, real=self._total_train_tokens)
        return total
