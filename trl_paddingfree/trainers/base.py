"""What the padding-free trainers add to TRL's: one model forward, one check, one set of figures."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .. import upstream
from ..batching.arrange import StepSampler
from ..check.prove import UnprovenModelError
from ..data.image_probe import ImageProbe
from ..data.images import has_images
from ..data.task import Task
from ..flat.batch import BatchCounts
from ..model.forward import install, installed
from ..model.routes import Route
from .checkpoints import WholeCheckpoints
from .configs import PaddingFreeOptions, refuse_wrong_options
from .memory_budget import MemoryBudget
from .micro_batches import Part, PartMetrics
from .model_card import describe_method
from .proving import StartUpCheck, base_of
from .quiet import silence
from .refusals import given_datasets, refuse_images, refuse_unflattenable, warn_of_dropout
from .token_counts import TokenCounts, gathered


@dataclass
class Flat:
    """
    What a trainer does beside TRL's.

    Args:
        options ([`PaddingFreeOptions`]):
            What was asked for.
        check ([`StartUpCheck`], *optional*):
            How models are proven; `None` before the models are there.
        bases (`list[PreTrainedModel]`, *optional*):
            The transformers models that compute batches, under whatever wrappers; the one that is trained first.
        route ([`~trl_paddingfree.model.routes.Route`], *optional*):
            How batches are computed: planned, and from the check on proven. `None` before the models are there.
        awaits_weights (`bool`, *optional*, defaults to `False`):
            Whether the check is still to come, because an engine has yet to place the weights.
        sampler (`StepSampler`, *optional*):
            The order of training, if `arrange_micro_batches` makes one.
        part (`tuple[Part, PartMetrics]`, *optional*):
            The part of a micro-batch that is being computed.
        memory ([`MemoryBudget`], *optional*):
            The plan under `memory_budget`; `None` without one, and before the models have their weights.
        resumed_from (`str`, *optional*):
            The checkpoint that training goes on from.
    """

    options: PaddingFreeOptions
    check: StartUpCheck | None = None
    bases: list[PreTrainedModel] = field(default_factory=list)
    route: Route | None = None
    awaits_weights: bool = False
    sampler: StepSampler | None = None
    part: tuple[Part, PartMetrics] | None = None
    memory: MemoryBudget | None = None
    resumed_from: str | None = None


class FlatTrainer(WholeCheckpoints):
    """
    Base of the padding-free trainers, mixed in before one of TRL's.

    A subclass names TRL's trainer, its own task and configuration, and runs TRL's `__init__` by `start`.
    """

    task: Task
    trl_trainer: Any  # TRL's trainer class
    trl_config: Any  # and its configuration class
    config_class: Any  # our configuration class
    flat: Flat | None = None  # `None`: the trainer is TRL's own
    train_dataset: Any
    model: Any
    ref_model: Any = None
    args: Any

    # --- at the start -----------------------------------------------------------------------------------------------

    def start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run TRL's `__init__` with the arguments that its signature gives them, and then make the trainer flat."""
        silence()
        self.counts = TokenCounts()
        arguments = inspect.signature(self.trl_trainer.__init__).bind(self, *args, **kwargs).arguments
        del arguments["self"]
        if arguments.get("args") is None:
            model = arguments["model"]
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            arguments["args"] = self.config_class(f"{name.split('/')[-1]}-{self.trl_trainer._name}")
        config = arguments["args"]
        refuse_wrong_options(config)  # again: they may have been set since
        if not getattr(config, "padding_free", True):  # not all of TRL's configurations have the flag
            self.trl_trainer.__init__(self, **arguments)
            return
        is_ours = isinstance(config, PaddingFreeOptions)
        options = config if is_ours else PaddingFreeOptions(prefix_sharing=self.config_class.prefix_sharing)
        self.flat = Flat(options)
        self.refuse_arguments(arguments)
        config.padding_free = False  # TRL's own flag warns and pads (DPO), or refuses `max_length` (SFT)
        try:
            self.trl_trainer.__init__(self, **arguments)
        finally:
            config.padding_free = True
        self.padding_free = True
        if self.task.vision_collator is None:  # what TRL refuses of images, it has refused in its own words
            refuse_images(arguments)
        self.start_flat()
        self.refuse_data(given_datasets(arguments))
        self.refuse_micro_batches()

    def refuse_arguments(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments of the trainer that cannot be combined with flat batches."""
        refuse_unflattenable(arguments, self.collator_of(has_images(arguments.get("train_dataset"))))

    def collator_of(self, with_images: bool) -> Any:
        """The collator class that gives flat batches of data with or without images."""
        return (self.task.vision_collator if with_images else None) or self.task.collator

    def images_to_try(self) -> ImageProbe | None:
        """Examples with images for the check; `None` for text."""
        return None

    def refuse_micro_batches(self) -> None:
        """Refuse options that move examples between micro-batches where that would change the loss."""
        raise NotImplementedError

    def flat_models(self) -> list[Any]:
        """The models that compute batches, under whatever wrappers; the one that is trained first."""
        return [self.model] if self.ref_model is None else [self.model, self.ref_model]

    def start_flat(self) -> None:
        """
        Prove the models, and install the flat forward on them. Once.

        Prefixes are shared only if every model passes with shared prefixes.
        """
        flat = self.flat
        if flat is None or flat.route is not None:
            return
        flat.check = StartUpCheck(self.accelerator, flat.options, self.args, self.images_to_try())
        models = self.flat_models()
        flat.bases = [self.flat_base(model) for model in models]
        if all(flat.check.can_call(model, model is self.model) for model in models):
            flat.route = flat.check.prove_all(models)
        else:  # the engine shards and places the weights when training starts: the check waits for it
            routes = [flat.check.plan(model) for model in models]
            for base, route in zip(flat.bases, routes, strict=True):
                install(base, route)
            flat.route, flat.awaits_weights = routes[0], True
        upstream.keep_varlen_results(self.model)
        warn_of_dropout(flat.bases[0], self.args)

    def refuse_data(self, datasets: list[tuple[str, Any]]) -> None:
        """Refuse data, as the user gave it, that the model cannot compute."""

    def prove_placed(self, model: Any) -> None:
        """The check of models that had no weights to call when the trainer was made, before they compute anything."""
        flat = self.flat
        if flat is None or flat.check is None or flat.route is None or not flat.awaits_weights:
            return
        models = [model]
        if self.flat_base(model) is self.flat_base(self.model):
            flat.awaits_weights = False
            models += self.flat_models()[1:]
        planned, flat.route = flat.route, flat.check.prove_all(models)
        if planned.prefix_sharing and not flat.route.prefix_sharing:
            raise UnprovenModelError(
                f"{type(self.flat_base(model)).__name__} cannot share prefixes, which was found out after the first "
                "batches had been laid out: set `prefix_sharing=False`."
            )

    def flat_base(self, model: Any) -> PreTrainedModel:
        """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
        return base_of(self.accelerator, model)

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

    def total_counts(self) -> BatchCounts:
        """What was computed in training so far, on all processes. With TRL's padding, `distinct` is 0: not known."""
        return gathered(self.counts.total, self.accelerator)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.flat is not None and self.model.training and "loss" in logs:
            forward = installed(self.flat_base(self.model))
            assert forward is not None
            logs.update(self.counts.figures(self.accelerator, forward.carries_state))
            if self.flat.memory is not None:
                logs.update(self.flat.memory.figures(self.accelerator))
        super().log(logs, *args, **kwargs)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "padding-free"] if self.flat else tags)
        if self.flat is not None and self.is_world_process_zero():
            share = self.counts.total.computed / max(self.counts.total.padded, 1)
            describe_method(Path(self.args.output_dir) / "README.md", self.method, share)
