"""Base of the trainers with a collator."""

from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset

from ..data.collate import FlatCollator
from ..data.lengths import has_images, has_known_lengths, row_lengths, token_lengths
from ..data.task import Columns
from ..flat.batch import Inputs
from ..flat.counts import BatchCounts
from ..model.edits import refuse_lost_batch
from . import refusals
from .base import FlatTrainer
from .configs import Arguments
from .runtime import when_flat


class Collated(FlatTrainer):
    """
    Base of the trainers whose batches come from a collator, which makes them flat. Mixed in before one of TRL's
    trainers.

    >>> from trl_paddingfree import PaddingFreeDPOTrainer
    >>> [base.__name__ for base in PaddingFreeDPOTrainer.__bases__]
    ['CollatedTrainer', 'DPOTrainer']
    """

    data_collator: FlatCollator
    # Set by TRL's trainers
    _train_batch_size: int
    _is_vision_dataset: bool = False

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        given, ours = arguments.get("data_collator"), self.collator_of(has_images(arguments.get("train_dataset")))
        if given is not None and not self.takes_collator(given, ours):
            refusals.refuse_collator(given, ours)

    def takes_collator(self, given: object, ours: type[FlatCollator]) -> bool:
        """Whether the batches of a `given` collator become flat, where `ours` is the class that makes flat ones."""
        return isinstance(given, ours) or ours.flattens(given)

    def collator_of(self, with_images: bool) -> type[FlatCollator]:
        """The collator class that makes flat batches of data with or without images."""
        return self.task.collator

    def start_flat(self) -> None:
        """As for any trainer, and the collator makes flat batches."""
        if not self.runtime.models:
            super().start_flat()
            self.collate_flat()

    def collate_flat(self) -> None:
        self.data_collator = self._flat_collator().changed(**self.collated_with())

    def collated_with(self) -> dict[str, Any]:
        """Values of the collator that follow from what was found out about the models."""
        return {
            "prefix_sharing": self.runtime.trained.route.prefix_sharing,
            "rotary_limit": min(self.runtime.rotary_limits().values(), default=None),
        }

    @when_flat
    def _precompute_ref_logps(self, *args, **kwargs):
        # TRL may call this in its `__init__`, after it has added the fused heads: models must be flat by then
        self.start_flat()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _flat_collator(self) -> FlatCollator:
        """A copy of the collator that makes flat batches: the user's own may serve another trainer."""
        collator: FlatCollator = self.data_collator
        if not isinstance(collator, FlatCollator):
            collator = self.flat_collator_of(collator)
        return collator.changed(padding_free=True)

    def flat_collator_of(self, collator: Any) -> FlatCollator:
        """A collator that makes the rows of `collator` flat, which knows of no flat batches."""
        return self.collator_of(self._is_vision_dataset).of(collator)

    # --- lengths ------------------------------------------------------------------------------------------------------

    def collated_by(self, name: str) -> Any:
        """The collator's value of an argument or, if a user's own collator lacks it, the configuration's, or `None`."""
        return getattr(self.data_collator, name, getattr(self.args, name, None))

    @property
    def token_columns(self) -> Columns:
        """Columns of the prepared training data that hold token ids: those of the task."""
        return self.task.token_columns

    @property
    def knows_lengths(self) -> bool:
        """Whether the lengths of all training examples are known before any is collated."""
        return not self._is_vision_dataset and has_known_lengths(self.train_dataset, self.token_columns)

    def exceeds(self, length: int) -> bool:
        """Whether a training row may be longer than `length`, with its padding to a multiple."""
        limit, multiple = self.collated_by("max_length"), self.collated_by("pad_to_multiple_of") or 1
        length = length // multiple * multiple
        if not self.knows_lengths:
            # Rows are cut by the collator or by TRL's preparation, which reads streams, but not what a transform makes
            is_cut = "max_length" in vars(self.data_collator) or not isinstance(self.train_dataset, Dataset)
            return limit is None or limit > length or not is_cut
        return bool((row_lengths(self.item_lengths()) > length).any())

    def weighed_by_micro_batch(self) -> list[str]:
        """Options under which the weight of an example in a step depends on its micro-batch, or on its process."""
        return []

    def example_lengths(self) -> np.ndarray:
        """
        Lengths of the training examples in tokens, after truncation, int64: of the prompt and of each completion,
        `(examples, 1 + completions)`, or of the row, `(examples, 1)`. An example that has fewer completions
        than others has -1 for each that is not there.
        """
        return token_lengths(self.train_dataset, self.token_columns)

    def item_lengths(self) -> np.ndarray:
        """Like `example_lengths`, for the largest item that parts do not divide: by default, the whole example."""
        return self.example_lengths()

    # --- a micro-batch ----------------------------------------------------------------------------------------------

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        """By name, the denominators of the loss ("loss") and of each averaged metric of a part of a micro-batch."""
        raise NotImplementedError

    def count_tokens(self, inputs: Inputs) -> None:
        if "flat_batch" not in inputs:
            refuse_lost_batch(inputs)
        self.runtime.counts.new.append(inputs["flat_batch"].counts)

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        slots = inputs["input_ids"].numel()
        return BatchCounts(slots, padded=slots)

    def total_counts(self) -> BatchCounts:
        total = super().total_counts()
        # Only TRL counts the real tokens of padded batches
        return replace(total, real=self._total_train_tokens) if self.runtime.pads else total
