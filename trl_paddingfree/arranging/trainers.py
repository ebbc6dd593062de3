"""What arranging adds to the trainers: which examples share a micro-batch, where the losses of examples add up."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset, IterableDataset
from torch.utils.data import RandomSampler

from ..core.data.lengths import example_work
from ..core.flat.batch import Inputs
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.refusals import is_ours
from ..core.trainers.runtime import Step, when_flat
from ..coupling import may_couple, own_steps
from .order import StepSampler, by_prefix, by_tokens
from .prompts import by_prompt
from .refusals import refuse_to_look_ahead, refuse_to_move


class Arranging(FlatTrainer):
    """Refuses to move examples whose losses depend on the others."""

    @property
    def _arranges(self) -> bool:
        return self.runtime.options.arrange_micro_batches != "none"

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        if self._arranges:
            self.refuse_arranged_arguments(arguments)

    def refuse_arranged_arguments(self, arguments: Arguments) -> None:
        """Refuse arguments of the trainer under which examples are not moved."""
        if is_ours(type(self), "coupled_by"):
            refuse_to_move(self.runtime.options, self.coupled_by_arguments(arguments))


class ArrangingCollated(Arranging, collated.Collated):
    """For trainers with a collator: their sampler moves examples within each optimizer step."""

    _sampler: StepSampler | None = None  # the order of examples

    def refuse_arranged_arguments(self, arguments: Arguments) -> None:
        super().refuse_arranged_arguments(arguments)
        dataset = arguments.get("train_dataset")
        if isinstance(dataset, Dataset | IterableDataset):  # it has no tokens yet
            refuse_to_look_ahead(self.runtime.options, dataset, arguments["args"], ())

    def refuse_options(self) -> None:
        super().refuse_options()
        if not self._arranges:
            return
        coupling = may_couple(self, moves=True)
        for kind, length in self.runtime.rotary_limits().items():
            if self.exceeds(length):
                coupling.append(f"`rope_type={kind!r}` and rows of more than {length} tokens")
        alpha = self.args.neftune_noise_alpha
        if alpha and not any("neftune_noise_alpha" in each for each in coupling):
            coupling.append(f"`neftune_noise_alpha={alpha}`, whose noise shrinks with the longest row,")
        refuse_to_move(self.runtime.options, [*coupling, *self.weighed_by_micro_batch()])
        refuse_to_look_ahead(self.runtime.options, self.train_dataset, self.args, self.token_columns)

    @when_flat
    def _get_train_sampler(self, *args, **kwargs):
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        if not self._arranges:
            return sampler
        if isinstance(sampler, RandomSampler) and self.args.accelerator_config.use_seedable_sampler:
            # accelerate replaces it with this one, but would not find it inside ours
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=self.args.data_seed)
        batch_size = self._train_batch_size  # not that of `args`, which `auto_find_batch_size` does not lower
        if self.runtime.options.arrange_micro_batches == "prefix":
            arrange = by_prefix(self.train_dataset, self.token_columns[0])
        else:
            hidden_size = self.model.config.get_text_config().hidden_size
            work = example_work(self.example_lengths(), self.runtime.trained.route.prefix_sharing, hidden_size)
            arrange = by_tokens(work, batch_size, self.num_streams)
        step_size = batch_size * self.num_streams * self.args.gradient_accumulation_steps
        wraps = self.num_streams > 1 and not self.args.dataloader_drop_last
        self._sampler = StepSampler(sampler, step_size, arrange, keeps_first=wraps)
        if self._unless_coupled not in self.runtime.around_step:  # last, and so around the parts of a micro-batch
            self.runtime.around_step.append(self._unless_coupled)
        return self._sampler

    def _unless_coupled(self, step: Step, is_normalized: bool, inputs: Inputs) -> torch.Tensor:
        """Around a step: callbacks may have changed the loss."""
        refuse_to_move(self.runtime.options, may_couple(self, moves=True))
        return step(inputs)

    @when_flat
    def get_train_dataloader(self):
        loader: Any = super().get_train_dataloader()
        if self._sampler is not None:
            # accelerate finds only its own samplers: ours would restart at epoch 0 when several processes resume a run
            loader.set_sampler(self._sampler)
        return loader


class ArrangingOnline(Arranging):
    """For trainers that generate their rows: once they are there, those of one prompt come together."""

    # Set by TRL's trainers
    _buffered_inputs: Any
    _step: int

    def refuse_arranged_arguments(self, arguments: Arguments) -> None:
        self._refuse_lengths()
        super().refuse_arranged_arguments(arguments)

    def _refuse_lengths(self) -> None:
        if self.runtime.options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"`arrange_micro_batches='tokens'` needs rows of known length, and {self.trl_trainer.__name__} "
                "generates them: set 'prefix', which brings the rows of one prompt together, or 'none'."
            )

    def refuse_options(self) -> None:
        super().refuse_options()
        if self._arranges:
            self._refuse_lengths()
            owners = [cls for cls in type(self).__mro__ if "trl_trainer" in vars(cls)]
            refuse_to_move(self.runtime.options, [*self.coupled_by(), *own_steps(self, owners, moves=True)])

    @property
    def steps_per_generation(self) -> int:
        """How many micro-batches are generated together."""
        return self.args.steps_per_generation

    def split_by_row(self, batch: Inputs) -> Inputs:
        """A batch in which arguments with several entries per row are lists of one tensor per row."""
        return batch

    def kinds_of(self, rows: Inputs) -> Sequence[int]:
        """What tells rows apart beside their prompts, a number for each row."""
        return [0] * len(rows["prompt_ids"])

    @when_flat
    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._arranges and self.model.training:
            self.refuse_options()  # callbacks may have changed the loss
            if self._buffered_inputs is not before:
                number = self.steps_per_generation
                size = math.gcd(self.args.gradient_accumulation_steps, number)  # micro-batches of one optimizer step
                groups = (self._buffered_inputs[first : first + size] for first in range(0, number, size))
                arranged = (by_prompt(group, self.split_by_row, self.kinds_of) for group in groups)
                self._buffered_inputs = [batch for group in arranged for batch in group]
                inputs = self._buffered_inputs[self._step % number]
        return inputs


Collated = ArrangingCollated
Online = ArrangingOnline
