"""A training step under a budget: one loop over the parts of a micro-batch, for all trainers.

Where losses add up, a micro-batch above its budget becomes several parts, which are computed one after another, and
nothing is computed twice. Where the loss of an example depends on others it stays one part, and the model computes its
rows in parts beneath the loss, see [`~trl_paddingfree.model.forward.scored_in_parts`].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType

from ..flat.batch import Inputs
from ..memory.attempt import Attempt
from ..memory.budget import Budget
from ..memory.plan import Training, adds_up_shards, plan_memory
from .metrics import PartMetrics

if TYPE_CHECKING:
    from .base import FlatTrainer

Step = Callable[[Inputs], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A part of a micro-batch, or all of it."""

    inputs: Inputs
    # How many its loss, under the name "loss", and each of its metrics is a mean over: all 0 if it is computed only to
    # keep step with other processes. `None` if the micro-batch is one part on all processes
    sizes: dict[str, int] | None = None
    weight: float = 1.0  # by what its loss is multiplied, so that the losses of all parts add up to the micro-batch's
    is_last: bool = True  # gradients are synchronized after it


def weighted_parts(
    batches: Sequence[Inputs],
    count: Callable[[Inputs], dict[str, int]],
    whole: Part,
    *,
    num_wanted: int,
    is_normalized: bool,
) -> list[Part]:
    """
    The batches of the `whole`, a micro-batch or a part of one, with their weights; `count` gives their sizes, see
    [`Part`].

    `num_wanted` is how many parts there have to be: where processes gather weights, or reduce gradients, in each pass,
    those with fewer parts than others repeat one for nothing. With `is_normalized`, the loss is normalized by the
    tokens of the whole step, and adds up by itself.
    """
    sizes, last = [count(batch) for batch in batches], num_wanted - 1
    total, ends = max(sum(size["loss"] for size in sizes), 1), whole.is_last  # the last part of the last part
    parts = [
        Part(batch, size, 1.0 if is_normalized else whole.weight * size["loss"] / total, ends and i == last)
        for i, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    ]
    for i in range(len(batches), num_wanted):
        nothing = {**batches[-1], "attention_mask": torch.zeros_like(batches[-1]["attention_mask"])}
        parts.append(Part(nothing, dict.fromkeys(sizes[-1], 0), 0.0, ends and i == last))
    return parts


@contextmanager
def synchronizing(accelerator: Accelerator, model: torch.nn.Module, is_last: bool) -> Iterator[None]:
    """A context for a part of a micro-batch, after the last of which gradients of `model` are synchronized."""
    state, sync_gradients = accelerator.gradient_state, accelerator.sync_gradients
    # DeepSpeed goes by the flag below: its `no_sync` refuses some of its stages. FSDP's keeps gradients whole
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    holds = is_last or is_deepspeed or adds_up_shards(accelerator)
    state._set_sync_gradients(sync_gradients and is_last)
    try:
        with nullcontext() if holds else accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(sync_gradients)


def figures_of(trainer: "FlatTrainer") -> Callable[[], None]:
    """A function that puts back what a pass changes of metrics, counts, and what TRL's loss keeps account of."""
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    tokens, counted = trainer._total_train_tokens, trainer.counts.new
    state = {name: vars(trainer)[name] for name in trainer.changed_by_loss}

    def put_back() -> None:
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(metrics)
        trainer._total_train_tokens, trainer.counts.new = tokens, counted
        vars(trainer).update(state)

    return put_back


class TrainingSteps:
    """The training steps of a trainer under a [`~trl_paddingfree.memory.budget.Budget`]."""

    def __init__(self, trainer: "FlatTrainer", budget: Budget):
        self.trainer, self.budget = trainer, budget
        self.part: Part | None = None  # the part that is being computed, if there are others
        self.is_weighted = False  # whether its loss is
        self.attempt: Attempt | None = None  # of the pass that is being made

    @classmethod
    def planned(cls, trainer: "FlatTrainer") -> "TrainingSteps":
        """Those of a trainer whose models have their weights, under the budgets that its options ask for."""
        options, args, trained, memory = trainer.flat.options, trainer.args, trainer.model, None
        if options.memory_budget is not None:
            optimizer = trainer.optimizer
            training = Training(
                accelerator=trainer.accelerator,
                models=trainer.flat_models(),
                wrapped=trainer.model_wrapped,
                optimizer=trainer.get_optimizer_cls_and_kwargs(args, trained) if optimizer is None else optimizer,
                precision=trainer.flat.check.in_precision(),
                arguments={"output_router_logits": True} if trainer.aux_loss_enabled else {},
                head=type(trainer).head_bytes(*(flat.model for flat in trainer.flat.models)),
                images=trainer.images_in_memory(),
            )
            memory = plan_memory(options.memory_budget, trainer.flat.models[0], training, trainer.peak_memory)
        budget = Budget(
            memory,
            options.max_tokens_per_micro_batch,
            trainer.accelerator,
            [parameter for parameter in trained.parameters() if parameter.requires_grad],
            split=type(trainer).split,
            is_reentrant=bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
            smallest_part=trainer.smallest_part,
        )
        return cls(trainer, budget)

    def run(
        self, step: Step, parts: Sequence[Part], is_normalized: bool, metrics: PartMetrics | None = None
    ) -> torch.Tensor:
        """
        Forward and backward passes of the parts of a micro-batch, of which TRL's `step` makes one: the sum of their
        losses. `is_normalized` says whether the loss is normalized by the tokens of the whole step. Their metrics are
        logged together, or with the `metrics` of the part that they are of.
        """
        collected = PartMetrics(self.trainer) if metrics is None and parts[0].sizes is not None else metrics
        losses = []
        for part in parts:
            self.begin()
            try:
                losses.append(self._loss_of(step, part, collected))
                continue
            except RuntimeError as error:
                self.budget.shrink(error)
            # Here the error is gone, and with it all that its frames held
            assert self.attempt is not None
            with self.attempt.undone():
                again = self.trainer.parts_again(part, is_normalized)
                losses.append(self.run(step, again, is_normalized, collected))
        if collected is not None and metrics is None:
            collected.log()
        return torch.stack(losses).sum()

    def begin(self) -> None:
        """A pass begins: what it changes from here on can be taken back."""
        self.budget.largest = None
        if self.budget.memory is not None:
            trainer = self.trainer
            self.attempt = Attempt(self.budget.trained, trainer.accelerator.device, figures_of(trainer))

    def _loss_of(self, step: Step, part: Part, metrics: PartMetrics | None) -> torch.Tensor:
        """Forward and backward pass of a part, or of a micro-batch whose metrics are as TRL logs them."""
        trainer, inputs = self.trainer, self.trainer.started(part.inputs)
        if metrics is None:
            loss = step(inputs)
        else:
            assert part.sizes is not None
            self.part, self.is_weighted = part, False
            try:
                with synchronizing(trainer.accelerator, trainer.model_wrapped, part.is_last), metrics.of(part.sizes):
                    loss = step(inputs)
            finally:
                self.part = None
            if not self.is_weighted:
                raise ValueError(
                    f"`{type(trainer).__name__}.compute_loss` does not call `super().compute_loss`, which weights "
                    "the losses of parts: call it, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
                )
        if self.budget.memory is not None:
            self.budget.memory.finish(has_stepped=trainer.state.global_step > 0)
        return loss

    def weighted(self, loss: Any) -> Any:
        """The loss of the part that is being computed, alone or before other outputs, with its weight."""
        if self.part is None:
            return loss
        self.is_weighted = True
        return (self.part.weight * loss[0], *loss[1:]) if isinstance(loss, tuple) else self.part.weight * loss
