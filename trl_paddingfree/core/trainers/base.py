"""Base of the padding-free trainers. `docs/how_it_works.md` follows a training step, function by function."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ...capabilities import needed
from ..check.verdicts import NoVerdicts, Verdicts
from ..data.task import Task
from ..device import PeakMemory
from ..flat.batch import FlatBatch, Inputs
from ..flat.counts import BatchCounts, of_all_processes
from ..model.flat_model import FlatModel
from ..model.restored import attributes_set
from ..versions import naming_versions, refuse_moved_names
from . import refusals, starting
from .card import append_to_card, without_padding
from .configs import Arguments, PaddingFreeOptions, config_of, silence
from .engine import base_of, wants_compiled
from .evaluation import weigh_last_batch
from .proving import ExtraProof, Models, StartUpCheck
from .runtime import Runtime, Step, when_flat


class FlatTrainer(Trainer):
    """
    Base of the padding-free trainers, mixed in before TRL's: same arguments, losses, metrics and gradients.

    Without a configuration, or with one of TRL's, our options have their defaults. With `padding_free=False`, the
    default of TRL's `DPOConfig` and `SFTConfig`, the trainer pads as TRL's does. TRL's own collator is replaced,
    subclasses of it keep what they do, and SFT takes any other that pads. Arguments that rule out flat batches raise a
    `ValueError` that names what to change, a model that does not keep their rows apart an [`UnprovenModelError`], a
    training step that computes no flat batch a `RuntimeError`, and a release of TRL that has moved a name we need an
    `ImportError`. A subclass names TRL's trainer and configuration, and its own task and configuration.
    """

    task: Task
    trl_trainer: Any  # TRL's trainer class
    trl_config: Any  # and its configuration class
    config_class: Any  # our configuration class
    takes_sequence_parallel: ClassVar[bool] = False  # whether groups of processes may compute its batches
    trains_language_models: ClassVar[bool] = False  # whether TRL's trainer needs a model that can generate
    runtime: Runtime
    args: Any  # one of TRL's configurations
    train_dataset: Dataset
    model: PreTrainedModel
    ref_model: Any = None
    _total_train_tokens: int  # set by TRL's trainers
    aux_loss_enabled: bool = False
    router_aux_loss_coef: float = 0.0

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "trl_trainer" in vars(cls):
            refuse_moved_names(cls)
            cls.__signature__ = inspect.signature(cls.trl_trainer)  # type: ignore[attr-defined]

    if not TYPE_CHECKING:  # editors and type checkers see the constructor of TRL's trainer

        def __init__(self, *args, **kwargs):
            """Bind the arguments to TRL's signature, run its `__init__`, and make the trainer flat."""
            bound = inspect.signature(self.trl_trainer).bind(*args, **kwargs).arguments
            self._init(bound.pop("kwargs", {}) | bound)  # some of TRL's experimental trainers pass theirs on

    @naming_versions()
    def _init(self, arguments: Arguments) -> None:
        silence()
        self.refuse_at_once(arguments)
        arguments["args"] = config = config_of(type(self), arguments)
        is_ours = isinstance(config, PaddingFreeOptions)
        options: Any = config if is_ours else PaddingFreeOptions(prefix_sharing=self.config_class.prefix_sharing)
        # Not all of TRL's have the flag
        self.runtime = Runtime(options, pads=not vars(config).get("padding_free", True))
        self.refuse_even_padded(arguments)
        if self.runtime.pads:
            refusals.warn_of_padding(type(self), config)
            super().__init__(**arguments)
            return
        refusals.take_out_of_compilers(arguments)
        self.refuse_arguments(arguments)
        # With `padding_free=True`, TRL would warn and pad (DPO), or refuse `max_length` (SFT)
        with attributes_set([(config, "padding_free", False)]), self.as_it_trains(config):
            super().__init__(**arguments)
        refuse_moved_names(type(self), self)
        self.padding_free = True  # as the user has set it: TRL has read it while it was off
        self.start_flat()
        bases = [self.flat_base(model) for model in self.flat_models()]
        # TRL drops the reference once its log-probabilities are precomputed
        self.runtime.models = [flat for flat in self.runtime.models if flat.model in bases]
        self.refuse_options()
        self.after_init()

    def as_it_trains(self, config: TrainingArguments) -> AbstractContextManager[None]:
        """The context in which TRL makes the trainer, and trains. Budgets: layers may recompute."""
        return nullcontext()

    def after_init(self) -> None:
        """Called at the end of `__init__`, with flat models. Budgets: plan the memory."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.runtime.peak_memory = PeakMemory(self.accelerator.device)
        if not self.runtime.pads:
            self.take_compiler()
            loaders = self.accelerator.dataloader_config
            loaders.dispatch_batches = bool(loaders.dispatch_batches)  # `None` would dispatch batches of streams

    def take_compiler(self) -> None:
        """Take over what an accelerator would compile, which is the whole model. Compiled: its layers instead."""
        if wants_compiled(self.accelerator):
            needed("compiled", "trainers", "`torch_compile=True`")

    def refuse_at_once(self, arguments: Arguments) -> None:
        """Refuse arguments that nothing can be done with, before any is read: here, none."""

    def refuse_even_padded(self, arguments: Arguments) -> None:
        """Refuse arguments of the trainer whether it pads or not: here, none."""

    def refuse_arguments(self, arguments: Arguments) -> None:
        """Refuse arguments of the trainer that cannot be combined with flat batches."""
        refusals.refuse_unflattenable(arguments)
        self.refuse_images(arguments)

    def refuse_images(self, arguments: Arguments) -> None:
        """Refuse data with images, unless a capability trains on them."""
        refusals.refuse_images(arguments)

    def proofs(self) -> Sequence[ExtraProof]:
        """What the start-up check proves beside text."""
        return ()

    def make_check(self) -> StartUpCheck:
        """The start-up check of this trainer's models."""
        return StartUpCheck(
            self.accelerator, self.runtime.options, self.args, self.proofs(), earlier=self.earlier_verdicts()
        )

    def earlier_verdicts(self) -> Verdicts:
        """Verdicts of earlier checks, which the check takes over."""
        return NoVerdicts()

    @property
    def num_streams(self) -> int:
        """How many processes, or groups of processes, get batches of their own."""
        return self.accelerator.num_processes

    def coupled_by_arguments(self, arguments: Arguments) -> list[str]:
        """Those of `coupled_by` that the trainer's arguments show, by which they are refused before models load."""
        return []

    def coupled_by(self) -> list[str]:
        """Options under which an example's loss depends on the others in its micro-batch: here, losses of routers."""
        return [f"`router_aux_loss_coef={self.router_aux_loss_coef}`"] if self.aux_loss_enabled else []

    def refuse_options(self) -> None:
        """Refuse options that would change losses or gradients: here, none."""

    def flat_models(self) -> list[torch.nn.Module]:
        """The models that compute batches, wrapped or not: the trained one first."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def rows_of_call(
        self, flat_model: FlatModel, args: tuple[Any, ...], kwargs: Inputs
    ) -> tuple[Inputs, FlatBatch] | None:
        """
        The rows of a model's call with these arguments, as a model takes them, and their flat batch; `None` if the call
        has none.
        """
        if (batch := kwargs.get("flat_batch")) is None:
            return None
        return {name: value for name, value in kwargs.items() if name != "flat_batch"}, batch

    def flat_base(self, model: torch.nn.Module) -> PreTrainedModel:
        """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
        return base_of(self.accelerator, model)

    def start_flat(self) -> None:
        """Prove the models, and have them compute flat batches. Does nothing if called again."""
        if not self.runtime.models:
            self.before_flat()
            starting.start(self)

    def before_flat(self) -> None:
        """Called once, before the models are proven: after TRL's `__init__`, or in it if TRL precomputes references."""

    def after_flat(self, models: Models, are_proven: bool) -> None:
        """Called once `models` compute flat batches, and again when those are proven that had to wait for weights."""

    def prove(self, model: torch.nn.Module) -> None:
        """Prove a `model` before it first computes anything, if it had no weights when the trainer was made."""
        starting.prove(self, model)

    def collate_flat(self) -> None:
        """Have a collator make flat batches, if there is one, once the models compute them."""

    # --- a training step --------------------------------------------------------------------------------------------

    @when_flat
    def training_step(self, model, inputs, num_items_in_batch=None):
        step: Step = partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        if not self.runtime.has_begun:
            self.begin_training(model)
        self.count_tokens(inputs)
        # Batches of any task may have `labels`, which transformers counts. It has this attribute since 5.19
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        is_normalized = num_items_in_batch is not None and is_scaled is not False
        for around in self.runtime.around_step:
            step = partial(around, step, is_normalized)
        with self.runtime.trained.must_train(self):
            loss = step(inputs)
        self.refuse_edits()
        return loss

    def begin_training(self, model: torch.nn.Module) -> None:
        """Called in the first step of each `train()`: prove the `model` if that had to wait for its weights."""
        self.prove(model)
        self.runtime.has_hooks = None  # what was changed since the trainer was made counts, also as `train()` began
        self.refuse_options()
        self.runtime.has_begun = True
        self.runtime.counts.restart()

    def count_tokens(self, inputs: Inputs) -> None:
        """Count the tokens of a micro-batch, if its rows are flat before the model is called."""

    @when_flat
    def prediction_step(self, model, inputs, *args, **kwargs):
        weigh_last_batch(self, inputs)
        outputs = super().prediction_step(model, inputs, *args, **kwargs)
        self.refuse_edits()
        return outputs

    def refuse_edits(self) -> None:
        """Refuse rows that were edited after they became flat. Waits only if the loss read nothing from the device."""
        for flat_model in self.runtime.models:
            flat_model.edits.read()

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.runtime.pads:  # without `when_flat`, because padded tokens are counted, too
            if self.model.training:
                self.runtime.counts.new.append(self.padded_counts(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self.runtime.check.unproven:  # evaluation may come before any step of training
            self.prove(model)
        compute = super().compute_loss
        for around in self.runtime.around_loss:
            compute = partial(around, compute)
        return compute(model, inputs, *args, **kwargs)

    def padded_counts(self, inputs: Inputs) -> BatchCounts:
        """The token counts of a padded micro-batch."""
        raise NotImplementedError

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How batches are computed, in words. A training step that computes them in another way raises an error."""
        if (route := self.runtime.route) is not None:
            return f"padding-free ({route.backend}, {'' if route.prefix_sharing else 'no '}shared prefixes)"
        return "TRL, without padding" if vars(self).get("padding_free") else "TRL, with padding"  # TRL sets it to pack

    @property
    def sample_unit(self) -> str:
        """What a training micro-batch holds, in the plural, such as `"pairs"`."""
        return self.task.unit

    def total_counts(self) -> BatchCounts:
        """Counts over training so far, of all processes. With padding, `distinct` is unknown, and 0."""
        counts = BatchCounts(*of_all_processes(self.runtime.counts.total.as_tuple(), self.accelerator).sum(0).tolist())
        return counts if self.runtime.pads or self.runtime.trained.repeats else replace(counts, repeated=0)

    @when_flat
    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.model.training and {"loss", "learning_rate"} <= logs.keys():  # not what one process logs: all gather
            logs |= self.logged_figures()
        super().log(logs, *args, **kwargs)

    def logged_figures(self) -> dict[str, float]:
        """What is logged beside TRL's figures: of all steps since the last time, over all processes."""
        return self.runtime.counts.figures(self.accelerator, self.runtime.highest_peak, self.runtime.trained.repeats)

    @when_flat
    def create_model_card(self, model_name=None, dataset_name=None, tags=None):  # type: ignore[override]
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "padding-free"])
        if self.is_world_process_zero():
            append_to_card(self.args.output_dir, without_padding(self.method, self.runtime.counts.total))

    # --- around a run -----------------------------------------------------------------------------------------------

    @naming_versions()
    def train(self, *args, **kwargs):
        refusals.refuse_adapters([] if self.runtime.pads else self.flat_models())  # some may have been added since
        self.runtime.has_begun = False
        with self.as_it_trains(self.args):
            return super().train(*args, **kwargs)
