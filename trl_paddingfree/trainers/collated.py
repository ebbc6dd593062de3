"""The base of the trainers whose batches come from a collator: flat batches, arranged, and within a budget."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from accelerate import DistributedType
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import RandomSampler

from ..data.arrange import StepSampler, by_prefix, by_tokens, token_keys
from ..data.collate import FlatCollator
from ..data.lengths import example_tokens, example_work, has_known_lengths, row_lengths, token_lengths
from ..flat.batch import Inputs
from ..flat.counts import BatchCounts, of_all_processes
from ..images.collate import FlatVisionCollator
from ..images.examples import ImageProbe, first_examples, has_images
from ..memory.engine import is_sharded
from ..memory.plan import Plan
from ..model.edits import refuse_lost_batch, refuse_lost_values
from ..training import refusals
from ..training.configs import Arguments
from ..training.state import when_flat
from ..training.steps import Part, weighted_parts
from .base import FlatTrainer

# How many of the largest examples are looked at, by each measure
_CANDIDATES = 16


class CollatedTrainer(FlatTrainer):
    """
    Base of the trainers whose batches come from a collator: it makes them flat, and this keeps them within a budget.
    It is mixed in before one of TRL's trainers.

    >>> from trl_paddingfree import PaddingFreeDPOTrainer
    >>> [base.__name__ for base in PaddingFreeDPOTrainer.__bases__]
    ['CollatedTrainer', 'DPOTrainer']
    """

    data_collator: FlatCollator
    # What TRL's trainers set
    _train_batch_size: int
    _is_vision_dataset: bool = False

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        if has_images(arguments.get("train_dataset")):
            refusals.refuse_unseen(self.flat.options)

    def start_flat(self) -> None:
        """Prove the models, and have the collator make flat batches. Once."""
        if self.flat.models:
            return
        super().start_flat()
        self.data_collator = replace(self._flat_collator(), prefix_sharing=self.flat.trained.route.prefix_sharing)

    @when_flat
    def _precompute_ref_logps(self, *args, **kwargs):
        # TRL computes these, where it has any, inside its `__init__`, right after the models got their fused heads
        self.start_flat()
        self.plan_if_placed()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    # --- images -----------------------------------------------------------------------------------------------------

    def _flat_collator(self) -> FlatCollator:
        """The collator, such that it gives flat batches. A copy: the user's own may serve another trainer."""
        collator, wanted = self.data_collator, self.collator_of(self._is_vision_dataset)
        if not isinstance(collator, wanted):
            collator = wanted(**vars(collator))
        if not self._is_vision_dataset:
            return replace(collator, padding_free=True)
        assert isinstance(collator, FlatVisionCollator)
        return replace(collator, padding_free=True, rules=self.image_rules())

    def images_to_try(self) -> ImageProbe | None:
        """The first examples with images, as the collator will get them; `None` for text."""
        if not self._is_vision_dataset:
            return None
        collator, data = self._flat_collator(), self.train_dataset
        assert isinstance(collator, FlatVisionCollator)
        self._set_signature_columns_if_needed()
        kept = self._signature_columns if self.args.remove_unused_columns else None
        probe = ImageProbe(collator, first_examples(data, kept))
        if not probe.names:
            refusals.refuse_untried(data)
        return probe

    # --- which examples share a micro-batch -------------------------------------------------------------------------

    def collated_by(self, name: str) -> Any:
        """An argument of the collator, which may be one of the user's own, or else of the trainer."""
        return getattr(self.data_collator, name, getattr(self.args, name, None))  # not every one has every argument

    def exceeds(self, length: int) -> bool:
        """Whether a row of training may be longer than `length`."""
        limit = self.collated_by("max_length")
        if not has_known_lengths(self.train_dataset) or self._is_vision_dataset:
            is_cut = "max_length" in vars(self.data_collator) or not isinstance(self.train_dataset, Dataset)
            return limit is None or limit > length or not is_cut  # TRL cuts nothing that a transform makes
        return bool((row_lengths(self.item_lengths()) > length).any())

    def weighed_by_micro_batch(self) -> list[str]:
        """Options under which the weight of an example in a step depends on its micro-batch, or on its process."""
        return []

    def example_lengths(self) -> np.ndarray:
        """
        Lengths of what each training example holds, after truncation, int64: tokens of the prompt and of each
        completion, `(examples, 1 + completions)`; or of each row, `(examples, 1)`.
        """
        return token_lengths(self.train_dataset, self.task.token_columns)

    def item_lengths(self) -> np.ndarray:
        """The same of the largest item, where a budget divides examples. By default, it does not."""
        return self.example_lengths()

    def refuse_options(self) -> None:
        options, limits = self.flat.options, self.rotary_limits()
        if options.arrange_micro_batches != "none":
            reached = [(kind, length) for kind, length in limits.items() if self.exceeds(length)]
            rotary = [f"`rope_type={kind!r}` and rows of more than {length} tokens" for kind, length in reached]
            refusals.refuse_to_move(options, [*self.coupled_by(), *rotary, *self.weighed_by_micro_batch()])
            refusals.refuse_to_look_ahead(options, self.train_dataset, self.args)
        if self.group is not None:
            for kind, length in limits.items():
                if self.exceeds(length):
                    raise ValueError(self.group.too_long(kind, length))
        refusals.refuse_rotary_padding(self.collated_by("pad_to_multiple_of"), limits, self.exceeds)
        if options.has_budget and self._adds_up:
            refusals.refuse_lost_gradients(self.accelerator.state.deepspeed_plugin, self.args)

    @when_flat
    def _get_train_sampler(self, *args, **kwargs):
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        flat = self.flat
        if flat.route is None or flat.options.arrange_micro_batches == "none":
            return sampler
        if isinstance(sampler, RandomSampler) and self.args.accelerator_config.use_seedable_sampler:
            # What accelerate would put in its place, had it found it
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=self.args.data_seed)
        # `auto_find_batch_size` leaves the size in `args` as it was
        batch_size, processes = self._train_batch_size, self.accelerator.num_processes // self.group_size
        if flat.options.arrange_micro_batches == "prefix":
            arrange = by_prefix(token_keys(self.train_dataset, self.task.token_columns[0]))
        else:
            hidden_size = self.model.config.get_text_config().hidden_size
            work = example_work(self.example_lengths(), flat.route.prefix_sharing, hidden_size)
            arrange = by_tokens(work, batch_size, processes)
        step_size = batch_size * processes * self.args.gradient_accumulation_steps
        wraps = processes > 1 and not self.args.dataloader_drop_last
        flat.sampler = StepSampler(sampler, step_size, arrange, keeps_first=wraps)
        return flat.sampler

    @when_flat
    def get_train_dataloader(self):
        collator = self.data_collator
        if self.flat.options.has_budget:  # in training only: evaluation keeps no activations and needs no parts
            self.data_collator = replace(collator, keeps_rows=True)
        try:
            loader: Any = super().get_train_dataloader()
        finally:
            self.data_collator = collator
        if self.flat.sampler is not None:
            # accelerate finds its own samplers only: a run that several processes resume would go on at epoch 0
            loader.set_sampler(self.flat.sampler)
        return loader

    # --- a micro-batch, whole or in parts ---------------------------------------------------------------------------

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        """What the loss, under the name "loss", and each metric of a part of a micro-batch is a mean over: how many."""
        raise NotImplementedError

    @cached_property
    def _adds_up(self) -> bool:
        """Whether the losses of parts of a micro-batch add up to that of the whole, and it is known how."""
        return type(self).part_sizes is not CollatedTrainer.part_sizes and not self.coupled_by()

    def refuse_small_budget(self, plan: Plan) -> None:
        """Refuse a budget that the most demanding example does not fit into."""
        if not has_known_lengths(self.train_dataset) or self._is_vision_dataset:
            return  # lengths are not known before an example comes, and then it is refused
        lengths = self.item_lengths()
        tokens, longest = example_tokens(lengths, self.flat.trained.route.prefix_sharing), row_lengths(lengths).max(1)
        if plan.why_whole:
            plan.refuse_oversized(int(tokens.max()), f"example {tokens.argmax()}")
        if plan.needs is None:
            return
        # Layers need most for the most tokens, attention for the longest row, the head for the longest completions, and
        # all together for an example that is among the largest by one of these
        measures = (tokens, longest, lengths[:, -2:].sum(1))
        candidates = {int(i) for measure in measures for i in np.argsort(measure, kind="stable")[-_CANDIDATES:]}
        collator = replace(self.data_collator, keeps_rows=True)
        if not self._adds_up:  # all of a micro-batch is computed beneath one loss
            largest = np.argsort(tokens, kind="stable")[-self._train_batch_size :]
            batch = collator([self.train_dataset[int(i)] for i in largest])["flat_batch"]
            if plan.least_bytes(batch) > plan.budget:
                raise plan.too_small_for(batch, "a micro-batch of the largest examples")
        alone = [(i, batch) for i in candidates for batch in collator([self.train_dataset[i]])["rows"].alone()]
        least = [plan.least_bytes(batch) for _, batch in alone]
        if max(least) > plan.budget:
            worst, batch = alone[int(np.argmax(least))]
            raise plan.too_small_for(batch, f"example {worst} of the training data")

    def parts_of(self, whole: Part) -> list[Part]:
        inputs, plan = whole.inputs, self.flat.plan
        if "flat_batch" not in inputs or (plan is not None and "rows" not in inputs):
            refuse_lost_batch(inputs)
        batch, parts = inputs["flat_batch"], [whole]
        is_alone = self.accelerator.num_processes == 1
        if plan is not None and self._adds_up and not (is_alone and plan.is_whole(batch)):
            parts = self._divide(whole)
        counts = [part.inputs["flat_batch"].counts for part in parts]
        self.counts.new.append(counts[0] if len(parts) == 1 else batch.counts.in_parts(counts))
        return [replace(part, inputs={n: x for n, x in part.inputs.items() if n != "rows"}) for part in parts]

    def _divide(self, whole: Part) -> list[Part]:
        """The parts of a micro-batch whose losses add up."""
        # Those with images come last: DDP waits in the last part for gradients of all weights, the tower's too
        batches = sorted(self._divided(whole.inputs), key=lambda part: part["flat_batch"].images is not None)
        is_mixed, accelerator = len({part["flat_batch"].images is None for part in batches}) > 1, self.accelerator
        most, is_mixed = of_all_processes([len(batches), is_mixed], accelerator).amax(0).tolist()
        # Where each backward pass is one of all processes, those with fewer parts repeat one
        in_step = is_sharded(accelerator) or accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_mixed and in_step and accelerator.num_processes > 1:
            raise ValueError(refusals.PARTS_WITHOUT_IMAGES)
        if most == 1:  # on no process: else all of them gather the metrics of parts
            return [whole]
        return weighted_parts(batches, self.part_sizes, whole, most if in_step else len(batches))

    def _divided(self, inputs: Inputs) -> list[Inputs]:
        """The batches into which one is divided by its budget; itself if it fits."""
        whole, plan = inputs["flat_batch"], self.flat.plan
        assert plan is not None
        rows = replace(inputs["rows"], collator=self.data_collator)  # a worker sends them without the collator
        if rows.num_items == 1 or plan.is_whole(whole):
            return [inputs]
        self._refuse_edits_of_whole(inputs)
        reach = self.reach_of(whole)
        parts = [rows.take(items).with_flat(reach) for items in plan.parts(list(map(plan.load, rows.alone())))]
        # transformers moves tensors, and the data loader has moved flat batches before there were parts
        device = self.args.device
        return [{**part, "flat_batch": part["flat_batch"].to(device, non_blocking=True)} for part in parts]

    def _refuse_edits_of_whole(self, inputs: Inputs) -> None:
        """Refuse edits of a micro-batch that runs in parts: no call of the model will see them."""
        refuse_lost_values(inputs, inputs["rows"].rows)
        rows = {**inputs, "labels": self.data_collator.row_labels(inputs)}
        self.flat.trained.edits.ask(inputs["flat_batch"], rows, in_parts=True)

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        slots = inputs["input_ids"].numel()
        return BatchCounts(slots, 0, slots, 0)

    def total_counts(self) -> BatchCounts:
        total = super().total_counts()  # TRL counts the real tokens of padded batches
        return replace(total, real=self._total_train_tokens) if self.flat.pads else total
