"""The base of the padding-free trainers: models that compute flat batches, one check, one set of figures."""

import inspect
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from transformers import PreTrainedModel, Trainer
from trl.trainer.utils import get_config_model_id

from .. import upstream
from ..check.prove import UnprovenModelError
from ..data.arrange import StepSampler
from ..data.images import ImageProbe, has_images
from ..data.task import Task
from ..flat.batch import FlatBatch
from ..flat.counts import BatchCounts, TokenCounts, of_all_processes
from ..memory.device import PeakMemory
from ..memory.plan import MemoryBudget, is_sharded, plan_memory
from ..memory.steps import BudgetedSteps
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.routes import Route
from .checkpoints import append_to_card, checkpoint_to_resume, load_by_name, state_file
from .configs import PaddingFreeOptions, refuse_wrong_options, silence
from .proving import StartUpCheck, base_of
from .refusals import given_datasets, refuse_beside_budget, refuse_images, refuse_unflattenable, warn_of_dropout


@dataclass
class Flat:
    """What a trainer does beside TRL's: options at once, models and their check after TRL's, the rest with training."""

    options: PaddingFreeOptions
    check: StartUpCheck | None = None
    models: list[FlatModel] = field(default_factory=list)  # the one that is trained first
    steps: BudgetedSteps | None = None  # training steps within budgets; `None` without one, and before the weights
    sampler: StepSampler | None = None  # the order of training, if `arrange_micro_batches` makes one
    resumed_from: str | None = None  # the checkpoint that training goes on from

    @property
    def route(self) -> Route | None:
        """How batches are computed: planned, and from the check on proven. `None` before the models are there."""
        return self.models[0].route if self.models else None

    @property
    def memory(self) -> MemoryBudget | None:
        """The plan under `memory_budget`."""
        return None if self.steps is None else self.steps.memory


class FlatTrainer(Trainer):
    """
    Base of the padding-free trainers, mixed in before one of TRL's: with its arguments, losses, metrics and gradients.

    With TRL's own configuration, and its `padding_free=True` where it has that flag, the options of this package have
    their defaults. TRL's default collator is taken over, any other has to give flat batches. With `padding_free=False`,
    the trainer pads as TRL's does. What cannot be combined with flat batches raises a `ValueError` that names what to
    change, and a model that does not treat a flat batch as separate sequences an [`UnprovenModelError`].

    A subclass names TRL's trainer, its own task and configuration. Its arguments are those of TRL's trainer.
    """

    task: Task
    trl_trainer: Any  # TRL's trainer class
    trl_config: Any  # and its configuration class
    config_class: Any  # our configuration class
    flat: Any = None  # its [`Flat`]; `None`: the trainer pads as TRL's does
    changed_by_loss: ClassVar[tuple[str, ...]] = ()  # attributes in which TRL's loss keeps account
    # What a part of a micro-batch that does not fit by itself is called, and what makes it smaller
    smallest_part: ClassVar[tuple[str, str]] = ("an example of the training data", "`max_length`")
    train_dataset: Any
    model: Any
    ref_model: Any = None
    args: Any
    aux_loss_enabled: Any = False
    router_aux_loss_coef: Any = 0.0

    # --- at the start -----------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "trl_trainer" in vars(cls):
            cls.__signature__ = inspect.signature(cls.trl_trainer)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any):
        """Run TRL's `__init__` with the arguments that its signature gives them, and then make the trainer flat."""
        silence()
        self.counts = TokenCounts()
        arguments = inspect.signature(self.trl_trainer.__init__).bind(self, *args, **kwargs).arguments
        del arguments["self"]
        if arguments.get("args") is None:
            model = arguments["model"]
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            arguments["args"] = self.config_class(f"{name.split('/')[-1]}-{self.trl_trainer._name}")
        refuse_wrong_options(config := arguments["args"])  # again: they may have been set since
        if not vars(config).get("padding_free", True):  # not all of TRL's configurations have the flag
            self.trl_trainer.__init__(self, **arguments)
            return
        is_ours = isinstance(config, PaddingFreeOptions)
        options = config if is_ours else PaddingFreeOptions(prefix_sharing=self.config_class.prefix_sharing)
        self.flat = Flat(options)
        self.refuse_arguments(arguments)
        config.padding_free = False  # TRL's own flag warns and pads (DPO), or refuses `max_length` (SFT)
        if options.memory_budget is not None:
            config.gradient_checkpointing = config.activation_checkpointing = True  # the budget decides how far
        try:
            self.trl_trainer.__init__(self, **arguments)
        finally:
            config.padding_free = True
        self.padding_free = True
        if self.task.vision_collator is None:  # what TRL refuses of images, it has refused in its own words
            refuse_images(arguments)
        self.start_flat()
        bases = [self.flat_base(model) for model in self.flat_models()]
        # TRL may be done with the reference
        self.flat.models = [each for each in self.flat.models if each.model in bases]
        self.refuse_data(given_datasets(arguments))
        self.refuse_micro_batches()
        if not self.flat.check.awaits_weights and not is_sharded(self.accelerator):
            self.plan_steps()

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments of the trainer that cannot be combined with flat batches, or with a budget."""
        refuse_unflattenable(arguments, self.collator_of(has_images(arguments.get("train_dataset"))))
        if self.flat.options.has_budget:
            refuse_beside_budget(self.flat.options, arguments["args"])

    def collator_of(self, with_images: bool) -> Any:
        """The collator class that gives flat batches of data with or without images."""
        return (self.task.vision_collator if with_images else None) or self.task.collator

    def images_to_try(self) -> ImageProbe | None:
        """Examples with images for the check; `None` for text."""
        return None

    def coupled_by(self) -> list[str]:
        """Options under which an example's loss depends on which others share its micro-batch."""
        return [f"`router_aux_loss_coef={self.router_aux_loss_coef}`"] if self.aux_loss_enabled else []

    def refuse_micro_batches(self) -> None:
        """Refuse options that move examples between micro-batches where that would change the loss."""
        raise NotImplementedError

    def refuse_data(self, datasets: list[tuple[str, Any]]) -> None:
        """Refuse data, as the user gave it, that the model cannot compute."""

    def flat_models(self) -> list[Any]:
        """The models that compute batches, under whatever wrappers; the one that is trained first."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def flat_base(self, model: Any) -> PreTrainedModel:
        """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
        return base_of(self.accelerator, model)

    def start_flat(self) -> None:
        """Prove the models, and have them compute flat batches: with shared prefixes, if every model can. Once."""
        flat = self.flat
        if flat is None or flat.models:
            return
        flat.check = StartUpCheck(self.accelerator, flat.options, self.args, self.images_to_try())
        upstream.cast_inputs_once(self.model, self.accelerator.device.type)
        flat.models = flat.check.install(self.flat_models())
        upstream.keep_varlen_results(self.model)
        warn_of_dropout(flat.models[0].model, self.args)

    def prove_placed(self, model: Any) -> None:
        """The check of models that had no weights to call when the trainer was made, before they compute anything."""
        flat = self.flat
        if flat is None or flat.check is None or not flat.check.is_due(model):
            return
        models = [model]
        if self.flat_base(model) is self.flat_base(self.model):
            flat.check.awaits_weights = False
            models += self.flat_models()[1:]
        planned, proven = flat.models[0].route, flat.check.prove_all(models)
        if planned.prefix_sharing and not proven.prefix_sharing:
            raise UnprovenModelError(
                f"{type(self.flat_base(model)).__name__} cannot share prefixes, which was found out after the first "
                "batches had been laid out: set `prefix_sharing=False`."
            )

    # --- budgets ----------------------------------------------------------------------------------------------------

    def plan_steps(self) -> None:
        """Plan for the budgets that were asked for, and refuse what no example fits into. Once."""
        flat = self.flat
        if flat is None or flat.steps is not None or not flat.options.has_budget:
            return
        memory = None
        if flat.options.memory_budget is not None:
            memory = plan_memory(self, flat.models[0], self.peak_memory)
            if flat.resumed_from is not None:
                memory.load(flat.resumed_from, self.args.process_index)
        flat.steps = BudgetedSteps(self, memory, flat.options.max_tokens_per_micro_batch)
        if memory is not None and not memory.has_shrunk:  # which makes it smaller than the data was measured by
            self.refuse_small_budget(memory)

    def refuse_small_budget(self, memory: MemoryBudget) -> None:
        """Refuse a budget that an example, of those that are known, does not fit into."""
        raise NotImplementedError

    def images_in_memory(self) -> list[dict[str, Any]]:
        """Arguments of calls with images, of which one differs from another in their number; none for text."""
        return []

    def reach_of(self, batch: FlatBatch) -> int | None:
        """The length that rotary frequencies follow in the rows of a batch; `None` if they do not."""
        width = batch.row_index.size(1)
        return width if any(width >= limit for limit in self.rotary_limits().values()) else None

    def rotary_limits(self) -> dict[str, int]:
        """Kinds of rotary frequencies that follow the longest row, with the length from which on they do in a model."""
        return architecture.rotary_limits(*(each.model.config.get_text_config() for each in self.flat.models))

    def _prepare_input(self, data: Any) -> Any:
        # transformers moves tensors and what holds them; batches in parts are made after the data loader has moved all
        if isinstance(data, FlatBatch):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How batches are computed, in words."""
        if self.flat is None or self.flat.route is None:
            return "TRL, with padding"
        sharing = "shared prefixes" if self.flat.route.prefix_sharing else "no shared prefixes"
        return f"padding-free ({self.flat.route.backend}, {sharing})"

    @property
    def sample_unit(self) -> str:
        """What a micro-batch of training holds, in the plural."""
        return self.task.unit

    @cached_property
    def peak_memory(self) -> PeakMemory:
        """The most memory in use so far."""
        return PeakMemory(self.accelerator.device)

    def total_counts(self) -> BatchCounts:
        """What was computed in training so far, on all processes. With TRL's padding, `distinct` is 0: not known."""
        counts = BatchCounts(*of_all_processes(self.counts.total.as_tuple(), self.accelerator).sum(0).tolist())
        return counts if self.flat is None or self.flat.models[0].repeats else replace(counts, repeated=0)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.flat is not None and self.model.training and "loss" in logs:
            logs |= self.counts.figures(self.accelerator, self.peak_memory.highest, self.flat.models[0].repeats)
            if self.flat.memory is not None:
                logs |= self.flat.memory.figures(self.accelerator)
        super().log(logs, *args, **kwargs)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "padding-free"] if self.flat else tags)
        if self.flat is not None and self.is_world_process_zero():
            append_to_card(self.args.output_dir, self.method, self.counts.total)

    # --- checkpoints: none is left half written, and runs resume from a whole one -----------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:  # a checkpoint that is written anew is not whole until it is whole again
            state_file(self.args.output_dir, self.state.global_step).unlink(missing_ok=True)
        super()._save_checkpoint(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # which makes the folder, in every process
        if self.flat is not None and self.flat.memory is not None:
            self.flat.memory.save(output_dir, self.args.process_index)
        # The trainer state, written next, says that a checkpoint is whole: what other processes write is part of it
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.flat is not None and checkpoint is not None:
            self.flat.resumed_from = checkpoint
            if self.flat.memory is not None:
                self.flat.memory.load(checkpoint, self.args.process_index)
        super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Models with images or experts have other names in files than in memory, which transformers' trainer does not
        # know: it warns, and goes on with the weights that the model was made with
        if load_result.missing_keys and load_result.unexpected_keys:
            load_by_name(*self.loading)
        else:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.loading: tuple[Any, Any] = resume_from_checkpoint, self.model if model is None else model
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.loading = self.state.best_model_checkpoint, self.model
        super()._load_best_model()
