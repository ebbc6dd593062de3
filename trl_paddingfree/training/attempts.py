"""Where an allocation fails, a pass is taken back, and computed again under a smaller budget."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from transformers.utils import logging

from ..memory.device import GIB
from ..memory.plan import Pass, Plan
from ..model.flat_model import Decision
from ..model.forward import is_allocation_failure
from ..model.restored import gradients_dropped

logger = logging.get_logger(__name__)

# What is left of the budget after a failed allocation
AFTER_FAILURE = 0.9
# The least tokens of a slice that is halved, because it has failed to allocate
LEAST_HALVED = 16


class Attempt:
    """
    What a forward and backward pass changes, as it was before: gradients of `parameters`, the random state of the CPU
    and of `device`, and what `put_back` puts back.

    No gradient is copied. One that the pass has added to is whole, because each parameter is added to once; it is kept,
    and what a repeated pass computes for it is dropped.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device, put_back: Callable[[], None]):
        # PyTorch counts the changes of each tensor
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in parameters]
        self.put_back, self.device = put_back, device
        self.random = torch.get_rng_state()
        self.on_device = None if device.type == "cpu" else torch.get_device_module(device)
        self.device_random = None if self.on_device is None else self.on_device.get_rng_state(device)
        self.whole: dict[torch.Tensor, torch.Tensor | None] = {}  # gradients that a failed pass has added to
        self.dropping = ExitStack()

    def undo(self) -> None:
        """Have what failed computed again."""
        self.put_back()
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            self.on_device.set_rng_state(self.device_random, self.device)
            torch.accelerator.empty_cache()
        for parameter, version in self.versions:
            gradient = parameter.grad
            if parameter not in self.whole and gradient is not None and gradient._version != version:
                self.whole[parameter], parameter.grad = gradient, None
                self.dropping.enter_context(gradients_dropped([parameter]))  # a second one might find no room

    def finish(self) -> None:
        """The pass has ended well: every gradient counts once."""
        self.dropping.close()
        for parameter, gradient in self.whole.items():
            parameter.grad = gradient


def figures_restorer(trainer: Any) -> Callable[[], None]:
    """A function that puts back what a pass changes of metrics, counts, and what TRL's loss keeps account of."""
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    tokens, counted = trainer._total_train_tokens, [*trainer.counts.new]
    state = {name: vars(trainer)[name] for name in trainer.changed_by_loss}

    def put_back() -> None:
        trainer._metrics["train"].clear()
        # Copies: what is put back may have to be once more
        trainer._metrics["train"].update({name: list(values) for name, values in metrics.items()})
        trainer._total_train_tokens, trainer.counts.new = tokens, [*counted]
        vars(trainer).update(state)

    return put_back


def shrink(plan: Plan, error: RuntimeError) -> None:
    """Have a plan decide otherwise if `error` says that memory ran out in its current pass. Else raise it."""
    # Before the decision, there is no current pass: where a trainer generates its rows, with memory of its own
    if (failed := plan.current) is None or not is_allocation_failure(error):
        raise error
    if advice := why_not_again(plan):
        raise type(error)(f"{error}\n{advice}") from error
    before = plan.budget, plan.limit
    for budget, limit in _smaller(plan, failed):
        plan.budget, plan.limit = budget, limit
        if _size(plan.own_decision(failed.batch), failed) < _size(failed.decision, failed):
            break
    else:
        plan.budget, plan.limit = before
        raise error
    plan.has_shrunk = True
    now = f"the memory budget is {plan.budget / GIB:.3f} GiB"
    if plan.limit != before[1]:
        now = f"micro-batches of more than {plan.limit} tokens are computed in slices"
    how = f"{failed.decision.num_slices} slices" if failed.decision.cuts else "one piece"
    logger.warning(
        f"An allocation failed in a micro-batch of {failed.batch.counts.computed} tokens, in {how}. It is computed "
        f"again, and from here on {now}."
    )


def _smaller(plan: Plan, failed: Pass) -> Iterator[tuple[int, int | None]]:
    """Budgets and limits to go on with: lower budgets for a batch that was computed whole, then slices of half."""
    budget, limit = plan.budget, plan.limit
    if plan.needs is not None and not failed.decision.cuts:
        lower, held = min(budget, failed.decision.peak), plan.needs.fixed
        while lower > held:
            lower = int(held + AFTER_FAILURE * (lower - held))
            yield lower, limit
    largest, _ = _size(failed.decision, failed)
    if not plan.why_whole and largest >= LEAST_HALVED:
        yield budget, largest // 2


def _size(decision: Decision, failed: Pass) -> tuple[int, int]:
    """What makes one decision on a batch smaller than another: the largest slice, and the layers that keep all."""
    return int(max(np.diff(decision.cuts), default=failed.batch.counts.computed)), -(decision.num_recomputed or 0)


def why_not_again(plan: Plan) -> str:
    """Why a pass cannot be computed again after a failed allocation; empty if it can."""
    what = "`memory_budget`" if plan.needs else "`max_tokens_per_micro_batch`"
    accelerator = plan.accelerator
    if accelerator.num_processes > 1 or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return (
            "One process cannot compute a micro-batch again while the others wait for its gradients. Lower "
            f"{what}, and resume from the last checkpoint."
        )
    layers = plan.flat_model.recomputable
    trained = [id(p) for layer in layers for p in set(layer.parameters()) if p.requires_grad]
    if plan.is_reentrant and len(trained) != len(set(trained)):
        return (
            "Layers that share weights add to the same gradients several times with `use_reentrant=True`, so that "
            f"a micro-batch cannot be computed again. Leave `use_reentrant` out, or lower {what}."
        )
    return ""
