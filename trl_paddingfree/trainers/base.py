"""What the padding-free trainers add to TRL's: one model forward, one check, one set of figures."""

import inspect
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from datasets import Dataset
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from ..batching.arrange import StepSampler
from ..batching.lengths import token_lengths
from ..check.prove import UnprovenModelError
from ..data.images import has_images
from ..data.task import Task
from ..flat.batch import BatchCounts
from ..model.forward import install
from ..model.routes import Route
from .checkpoints import WholeCheckpoints
from .configs import PaddingFreeOptions
from .micro_batches import Part, PartMetrics, arranged_sampler, arrangement, weighted_parts
from .model_card import describe_method
from .proving import StartUpCheck
from .quiet import silence
from .refusals import refuse_moving, refuse_oversized, refuse_unflattenable, refuse_unseen
from .token_counts import TokenCounts, gathered
from .vision import flat_collator, images_to_try


@dataclass
class Flat:
    """
    What a trainer does beside TRL's.

    Args:
        options ([`PaddingFreeOptions`]):
            What was asked for.
        check ([`StartUpCheck`], *optional*):
            How models are proven; `None` before the models are there.
        route ([`~trl_paddingfree.model.routes.Route`], *optional*):
            How batches are computed: planned, and from the check on proven. `None` before the models are there.
        awaits_weights (`bool`, *optional*, defaults to `False`):
            Whether the check is still to come, because an engine has yet to place the weights.
        sampler (`StepSampler`, *optional*):
            The order of training, if `arrange_micro_batches` makes one.
        part (`tuple[Part, PartMetrics]`, *optional*):
            The part of a micro-batch that is being computed.
    """

    options: PaddingFreeOptions
    check: StartUpCheck | None = None
    route: Route | None = None
    awaits_weights: bool = False
    sampler: StepSampler | None = None
    part: tuple[Part, PartMetrics] | None = None


class PaddingFreeTrainer(WholeCheckpoints):
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
    data_collator: Any
    model: Any
    args: Any
    # What Trainer and TRL's trainers set
    _is_vision_dataset: bool
    _train_batch_size: int
    _total_train_tokens: int
    aux_loss_enabled: Any
    router_aux_loss_coef: Any

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
        if not config.padding_free:
            self.trl_trainer.__init__(self, **arguments)
            return
        is_ours = isinstance(config, PaddingFreeOptions)
        options = config if is_ours else PaddingFreeOptions(prefix_sharing=self.config_class.prefix_sharing)
        self.flat = Flat(options)
        with_images = has_images(arguments.get("train_dataset"))
        refuse_unflattenable(arguments, self.collator_of(with_images))
        if with_images:
            refuse_unseen(options)
        config.padding_free = False  # TRL's own flag warns and pads (DPO), or refuses `max_length` (SFT)
        try:
            self.trl_trainer.__init__(self, **arguments)
        finally:
            config.padding_free = True
        self.padding_free = True
        self.start_flat()
        self.refuse_micro_batches()

    def collator_of(self, with_images: bool) -> Any:
        """The collator class that gives flat batches of data with or without images."""
        return self.task.vision_collator if with_images else self.task.collator

    def flat_models(self) -> list[Any]:
        """The models that compute batches, under whatever wrappers; the one that is trained first."""
        return [self.model]

    def start_flat(self) -> None:
        """
        Prove the models, install the flat forward on them, and have the collator make flat batches. Once.

        Prefixes are shared only if every model passes with shared prefixes.
        """
        flat = self.flat
        if flat is None or flat.route is not None:
            return
        models, collator = self.flat_models(), flat_collator(self)
        flat.check = StartUpCheck(self.accelerator, flat.options, images_to_try(self, collator))
        if all(flat.check.can_call(model, model is self.model) for model in models):
            flat.route = flat.check.prove_all(models)
        else:  # the engine shards and places the weights when training starts: the check waits for it
            routes = [flat.check.plan(model) for model in models]
            for model, route in zip(models, routes, strict=True):
                install(flat.check.base(model), route)
            flat.route, flat.awaits_weights = routes[0], True
        self.data_collator = replace(collator, prefix_sharing=flat.route.prefix_sharing)

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
        return StartUpCheck(self.accelerator, PaddingFreeOptions()).base(model)

    # --- which examples share a micro-batch -------------------------------------------------------------------------

    def coupled_by(self) -> list[str]:
        """Options under which an example's loss depends on which others share its micro-batch."""
        aux_loss = f"`router_aux_loss_coef={self.router_aux_loss_coef}`"
        return [aux_loss] if self.aux_loss_enabled else []

    def weighed_by_micro_batch(self) -> list[str]:
        """Options under which the weight of an example in a step depends on its micro-batch, or on its process."""
        return []

    def example_lengths(self) -> np.ndarray:
        """`(examples, 3)` or `(examples, 1)` int64: lengths of what each training example holds, after truncation."""
        return token_lengths(self.train_dataset, self.task.token_columns)

    def refuse_micro_batches(self) -> None:
        """Refuse options that move examples between micro-batches where that would change the loss."""
        if self.flat is None or self.flat.route is None:
            return
        refuse_moving(
            self.flat.options, self.train_dataset, self.args, self.coupled_by(), self.weighed_by_micro_batch()
        )
        limit, rule = self.flat.options.max_tokens_per_micro_batch, self.flat.options.oversized_examples
        if limit and rule == "error" and isinstance(self.train_dataset, Dataset):
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
        flat.sampler = arranged_sampler(sampler, arrange, step_size=step_size, data_seed=self.args.data_seed)
        return flat.sampler

    def get_train_dataloader(self):
        if self.flat is None:
            return super().get_train_dataloader()
        collator = self.data_collator
        if limit := self.flat.options.max_tokens_per_micro_batch:
            # In training only: evaluation keeps no activations and needs no parts
            self.data_collator = replace(collator, max_tokens=limit)
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
        batches = inputs.pop("parts", [inputs])
        most = len(batches)
        if self.flat is not None and self.flat.options.max_tokens_per_micro_batch:
            most = self._most_parts(len(batches))
        if most == 1:
            self._count(inputs, batches)
            return super().training_step(model, inputs, num_items_in_batch)
        is_normalized = num_items_in_batch is not None
        parts = weighted_parts(batches, self.part_sizes, num_wanted=most, is_normalized=is_normalized)
        self._count(inputs, [part.inputs for part in parts])
        metrics = PartMetrics(self)
        losses = [self._step_of_part(model, part, metrics, num_items_in_batch) for part in parts]
        metrics.log()
        return torch.stack(losses).sum()

    def _most_parts(self, num_parts: int) -> int:
        """The most parts that any process has."""
        if self.accelerator.num_processes == 1:
            return num_parts
        return int(self.accelerator.gather(torch.tensor([num_parts], device=self.accelerator.device)).max())

    def _step_of_part(self, model, part: Part, metrics: PartMetrics, num_items_in_batch) -> torch.Tensor:
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
        context: Any = super().compute_loss_context_manager()
        if self.flat is None or self.flat.part is None:
            return context
        stack, (part, metrics) = ExitStack(), self.flat.part
        stack.enter_context(metrics.of(part))
        stack.enter_context(context)
        return stack

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.prove_placed(model)
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        if self.flat is None or self.flat.part is None:
            return loss
        weight = self.flat.part[0].weight
        return (weight * loss[0], *loss[1:]) if isinstance(loss, tuple) else weight * loss

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How batches are computed, in words."""
        if self.flat is None or self.flat.route is None:
            return "TRL, with padding"
        sharing = "shared prefixes" if self.flat.route.prefix_sharing else "no shared prefixes"
        return f"padding-free ({self.flat.route.backend}, {sharing})"

    def _count(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Take note of a micro-batch and of the parts that it is computed in."""
        if self.flat is None:
            slots = inputs["input_ids"].numel()
            self.counts.add(BatchCounts(slots, 0, slots, 0))
        else:
            computed = sum(part["flat_batch"].counts.computed for part in parts)
            self.counts.add(replace(inputs["flat_batch"].counts, computed=computed))

    def total_counts(self) -> BatchCounts:
        """What was computed in training so far, on all processes. With TRL's padding, `distinct` is 0: not known."""
        total = gathered(self.counts.total, self.accelerator)
        if self.flat is None:  # TRL counts the real tokens of padded batches
            total = replace(total, real=self._total_train_tokens)
        return total

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.flat is not None and self.model.training and "loss" in logs:
            logs.update(self.counts.figures(self.accelerator))
        super().log(logs, *args, **kwargs)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "padding-free"] if self.flat else tags)
        if self.flat is not None and self.is_world_process_zero():
            share = self.counts.total.computed / max(self.counts.total.padded, 1)
            describe_method(Path(self.args.output_dir) / "README.md", self.method, share)
