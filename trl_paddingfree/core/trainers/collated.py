"""Base of the trainers with a collator: arranges their examples, and divides micro-batches under a budget."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, IterableDataset
from torch.utils.data import RandomSampler

from ...arranging.order import StepSampler, by_prefix, by_tokens
from ...budgets.planning import refuse_small_budget
from ...budgets.steps import Part
from ...coupling import own_steps
from ..data.collate import FlatCollator
from ..data.lengths import example_work, has_known_lengths, row_lengths, token_lengths
from ..data.padded import PaddedRowsCollator
from ..flat.batch import Inputs
from ..flat.counts import BatchCounts, of_all_processes
from ..flat.transfer import on_device
from ..model.edits import edits, refuse_edits, refuse_lost_batch, refuse_lost_values
from ..model.restored import attributes_set
from . import refusals
from .base import FlatTrainer
from .configs import Arguments
from .engine import is_sharded
from .runtime import when_flat


class Collated(FlatTrainer):
    """
    Base of the trainers whose batches come from a collator, which makes them flat; the trainer keeps them within a
    budget. Mixed in before one of TRL's trainers.

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
            "keeps_rows": self.flat.options.has_budget,
            "rotary_limit": min(self.flat.rotary_limits().values(), default=None),
        }

    @when_flat
    def _precompute_ref_logps(self, *args, **kwargs):
        # TRL may call this in its `__init__`, after it has added the fused heads: models must be flat by then
        self.start_flat()
        self.flat.plan_if_placed(self)
        with self._without_parts():
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
        if options.has_budget and not self._may_couple():
            refusals.refuse_lost_gradients(self.accelerator, self.args)

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

    def _without_parts(self) -> AbstractContextManager[None]:
        """Within this context, data loaders are made whose batches keep no rows: passes without gradients need none."""
        collator = self.data_collator  # by now, it may be one that was set since
        keeps_rows = self.flat.options.has_budget and isinstance(collator, FlatCollator)
        return attributes_set([(self, "data_collator", collator.changed(keeps_rows=False))] if keeps_rows else [])

    @when_flat
    def get_eval_dataloader(self, *args, **kwargs):
        with self._without_parts():
            return super().get_eval_dataloader(*args, **kwargs)

    @when_flat
    def get_test_dataloader(self, *args, **kwargs):
        with self._without_parts():
            return super().get_test_dataloader(*args, **kwargs)

    # --- a micro-batch, whole or in parts ---------------------------------------------------------------------------

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

    refuse_small_budget = refuse_small_budget

    def parts_of(self, inputs: Inputs, is_normalized: bool) -> list[Part]:
        planner = self.flat.planner
        if "flat_batch" not in inputs or (planner is not None and "rows" not in inputs):
            refuse_lost_batch(inputs)
        batch, parts = inputs["flat_batch"], [Part(inputs)]
        counts, is_alone = batch.counts, self.accelerator.num_processes == 1
        if self.flat.sampler is not None:  # callbacks may have changed the loss
            refusals.refuse_to_move(self.flat.options, self._may_couple(moves=True))
        if planner is not None and not (is_alone and planner.is_whole(batch)) and not self._may_couple():
            parts = self._weighted_parts(inputs, is_normalized)
            total = sum((part.inputs["flat_batch"].counts for part in parts), BatchCounts())
            counts = replace(counts, computed=total.computed, repeated=total.repeated)
        self.flat.counts.new.append(counts)
        return [replace(part, inputs={n: x for n, x in part.inputs.items() if n != "rows"}) for part in parts]

    def _weighted_parts(self, inputs: Inputs, is_normalized: bool) -> list[Part]:
        """The parts of a micro-batch whose losses add up. Sizes, and thus weights, are counted on the host."""
        accelerator = self.accelerator
        # Those with images come last: in the last part, DDP waits for gradients of all weights, including the tower's
        batches = sorted(self._divided(inputs), key=_has_images)
        most = len(batches)
        if is_sharded(accelerator) or accelerator.distributed_type == DistributedType.DEEPSPEED:
            # Backward passes are collective, so processes with fewer parts repeat their last one, masked
            is_mixed = len({*map(_has_images, batches)}) > 1
            most, is_mixed = of_all_processes([most, is_mixed], accelerator).amax(0).tolist()
            if is_mixed and accelerator.num_processes > 1:
                raise ValueError(
                    "A micro-batch above its budget has parts with images and parts without, and under FSDP and "
                    "DeepSpeed all processes compute the vision tower together: raise `memory_budget` or "
                    "`max_tokens_per_micro_batch`, leave it out, or train on examples that all have images."
                )
            if most == 1:  # no process divided its micro-batch; if one did, all gather `PartMetrics`
                return [Part(inputs)]
        sizes = [self.part_sizes(batch["rows"].rows if "rows" in batch else batch) for batch in batches]
        total = max(sum(size["loss"] for size in sizes), 1)
        weights = [1.0 if is_normalized else size["loss"] / total for size in sizes]
        parts = list(map(Part, batches, sizes, weights))
        if len(parts) < most:
            masked = {**batches[-1], "attention_mask": torch.zeros_like(batches[-1]["attention_mask"])}
            parts += [Part(masked, dict.fromkeys(sizes[-1], 0), 0.0)] * (most - len(parts))
        return parts

    def _divided(self, inputs: Inputs) -> list[Inputs]:
        """The batches into which the planner divides one; just that one if it fits or has a single item."""
        whole, rows, planner, collator = inputs["flat_batch"], inputs["rows"], self.flat.planner, self.data_collator
        assert planner is not None
        # Sizes and parts are made from the rows on the host, which do not show edits
        labels, made = map(collator.row_labels, (inputs, rows.rows))
        found = edits(whole, {**inputs, "labels": labels}, on_device(made, labels.device))
        self.flat.trained.edits.add(found, refuse_edits)
        if rows.num_items == 1 or planner.is_whole(whole):
            return [inputs]
        refuse_lost_values(inputs, rows.rows)
        features = list(map(planner.features, rows.alone(collator)))
        parts = [rows.take(items, collator).with_flat(collator) for items in planner.parts(features)]
        # transformers moves tensors, but not flat batches: the data loader has only moved that of the whole
        return [{**part, "flat_batch": part["flat_batch"].to(self.args.device, non_blocking=True)} for part in parts]

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        slots = inputs["input_ids"].numel()
        return BatchCounts(slots, padded=slots)

    def total_counts(self) -> BatchCounts:
        total = super().total_counts()
        # Only TRL counts the real tokens of padded batches
        return replace(total, real=self._total_train_tokens) if self.flat.pads else total


def _has_images(part: Inputs) -> bool:
    """Whether a part of a micro-batch needs modules beside the decoder: towers of images."""
    return any(hook.numbers for hook in part["flat_batch"].hooks)
