"""Base of the trainers with a collator, which arranges their examples."""

from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, IterableDataset
from torch.utils.data import RandomSampler

from ...arranging.order import StepSampler, by_prefix, by_tokens
from ...coupling import own_steps
from ..data.collate import FlatCollator
from ..data.lengths import example_work, has_known_lengths, row_lengths, token_lengths
from ..data.padded import PaddedRowsCollator
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

    def start_flat(self) -> None:
        """Prove the models, and have the collator make flat batches. Does nothing if called again."""
        if self.flat.models:
            return
        super().start_flat()
        self.data_collator = self._flat_collator().changed(**self.collated_with())

    def collated_with(self) -> dict[str, Any]:
        """Values of the collator that follow from what was found out about the models."""
        return {
            "prefix_sharing": self.flat.trained.route.prefix_sharing,
            "rotary_limit": min(self.flat.rotary_limits().values(), default=None),
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
        wanted: Any = self.collator_of(self._is_vision_dataset)
        return wanted.of(collator)

    # --- which examples share a micro-batch -------------------------------------------------------------------------

    def collated_by(self, name: str) -> Any:
        """The collator's value of an argument or, if a user's own collator lacks it, the configuration's, or `None`."""
        return getattr(self.data_collator, name, getattr(self.args, name, None))

    @property
    def _knows_lengths(self) -> bool:
        collates_tokens = not self._is_vision_dataset and not isinstance(self.data_collator, PaddedRowsCollator)
        return collates_tokens and has_known_lengths(self.train_dataset, self.task.token_columns)

    def exceeds(self, length: int) -> bool:
        """Whether a training row may be longer than `length`, with its padding to a multiple."""
        limit, multiple = self.collated_by("max_length"), self.collated_by("pad_to_multiple_of") or 1
        length = length // multiple * multiple
        if not self._knows_lengths:
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
        `(examples, 1 + completions)`, or of the row, `(examples, 1)`.
        """
        return token_lengths(self.train_dataset, self.task.token_columns)

    def item_lengths(self) -> np.ndarray:
        """Like `example_lengths`, for the largest item that parts do not divide: by default, the whole example."""
        return self.example_lengths()

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        options, dataset = self.flat.options, arguments.get("train_dataset")
        if options.arrange_micro_batches == "none":
            return
        if refusals.is_ours(type(self), "coupled_by"):
            refusals.refuse_to_move(options, self.coupled_by_arguments(arguments))
        if isinstance(dataset, Dataset | IterableDataset):  # it has no tokens yet
            refusals.refuse_to_look_ahead(options, dataset, arguments["args"], ())

    def refuse_options(self) -> None:
        options, arranges = self.flat.options, self.flat.options.arrange_micro_batches != "none"
        coupling = self._may_couple(moves=True) if arranges else []
        for kind, length in self.flat.rotary_limits().items():
            if arranges and self.exceeds(length):
                coupling.append(f"`rope_type={kind!r}` and rows of more than {length} tokens")
        if arranges:
            alpha = self.args.neftune_noise_alpha
            if alpha and not any("neftune_noise_alpha" in each for each in coupling):
                coupling.append(f"`neftune_noise_alpha={alpha}`, whose noise shrinks with the longest row,")
            refusals.refuse_to_move(options, [*coupling, *self.weighed_by_micro_batch()])
            refusals.refuse_to_look_ahead(options, self.train_dataset, self.args, self.task.token_columns)

    @when_flat
    def _get_train_sampler(self, *args, **kwargs):
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        flat = self.flat
        if flat.options.arrange_micro_batches == "none":
            return sampler
        if isinstance(sampler, RandomSampler) and self.args.accelerator_config.use_seedable_sampler:
            # accelerate replaces it with this one, but would not find it inside ours
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=self.args.data_seed)
        batch_size = self._train_batch_size  # not that of `args`, which `auto_find_batch_size` does not lower
        processes = self.num_streams
        if flat.options.arrange_micro_batches == "prefix":
            arrange = by_prefix(self.train_dataset, self.task.token_columns[0])
        else:
            hidden_size = self.model.config.get_text_config().hidden_size
            work = example_work(self.example_lengths(), flat.trained.route.prefix_sharing, hidden_size)
            arrange = by_tokens(work, batch_size, processes)
        step_size = batch_size * processes * self.args.gradient_accumulation_steps
        wraps = processes > 1 and not self.args.dataloader_drop_last
        flat.sampler = StepSampler(sampler, step_size, arrange, keeps_first=wraps)
        return flat.sampler

    @when_flat
    def get_train_dataloader(self):
        loader: Any = super().get_train_dataloader()
        if self.flat.sampler is not None:
            # accelerate finds only its own samplers: ours would restart at epoch 0 when several processes resume a run
            loader.set_sampler(self.flat.sampler)
        return loader

    # --- a micro-batch ----------------------------------------------------------------------------------------------

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        """By name, the denominators of the loss ("loss") and of each averaged metric of a part of a micro-batch."""
        raise NotImplementedError

    def _may_couple(self, moves: bool = False) -> list[str]:
        """
        Options under which an example's loss depends on others, and what may change it beyond the class whose
        `part_sizes` say how parts of it combine. Empty if the losses of parts add up to that of the micro-batch or, if
        asked whether it `moves`, if examples may move to another one.
        """
        owners = [cls for cls in type(self).__mro__ if "part_sizes" in vars(cls)]
        owners += [self.trl_trainer] * (owners == [Collated])  # no one says how its parts combine
        found = own_steps(self, owners, moves)
        if not moves and type(self).part_sizes is Collated.part_sizes:
            found.append("a loss")
        return [*self.coupled_by(), *(f"{each} without `part_sizes`" for each in found)]

    def count_tokens(self, inputs: Inputs) -> None:
        if "flat_batch" not in inputs:
            refuse_lost_batch(inputs)
        if self.flat.sampler is not None:  # callbacks may have changed the loss
            refusals.refuse_to_move(self.flat.options, self._may_couple(moves=True))
        self.flat.counts.new.append(inputs["flat_batch"].counts)

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        slots = inputs["input_ids"].numel()
        return BatchCounts(slots, padded=slots)

    def total_counts(self) -> BatchCounts:
        total = super().total_counts()
        # Only TRL counts the real tokens of padded batches
        return replace(total, real=self._total_train_tokens) if self.flat.pads else total
