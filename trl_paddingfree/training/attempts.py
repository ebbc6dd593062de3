"""If an allocation fails in a pass, all that the pass has changed is put back, and a smaller budget decides anew."""

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

    No gradient is copied. A pass adds to the gradient of a parameter once, so one that a failed pass has changed is
    complete. It is kept, and the one that the repeated pass computes is dropped.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device, put_back: Callable[[], None]):
        # PyTorch counts how often each tensor was changed
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in parameters]
        self.put_back, self.device = put_back, device
        self.random = torch.get_rng_state()
        self.on_device = None if device.type == "cpu" else torch.get_device_module(device)
        self.device_random = None if self.on_device is None else self.on_device.get_rng_state(device)
        self.complete: dict[torch.Tensor, torch.Tensor] = {}  # gradients that a failed pass has changed
        self.dropping = ExitStack()  # hooks that drop gradients of these parameters

    def undo(self) -> None:
        """A pass has failed: put back what it has changed, so that it can be repeated."""
        self.put_back()
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            self.on_device.set_rng_state(self.device_random, self.device)
            torch.accelerator.empty_cache()
        for parameter, version in self.versions:
            gradient = parameter.grad
            if parameter not in self.complete and gradient is not None and gradient._version != version:
                self.complete[parameter] = gradient
                parameter.grad = None
                self.dropping.enter_context(gradients_dropped([parameter]))  # at once: there may be no room for two

    def finish(self) -> None:
        """A pass has succeeded: put the gradients in place that failed ones have completed."""
        self.dropping.close()
        for parameter, gradient in self.complete.items():
            parameter.grad = gradient


def figures_restorer(trainer: Any) -> Callable[[], None]:
    """A function that puts back what a pass changes on a trainer: metrics, counts, and the state of TRL's loss."""
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    num_tokens, counts = trainer._total_train_tokens, [*trainer.counts.new]
    state = {name: vars(trainer)[name] for name in trainer.changed_by_loss}

    def put_back() -> None:
        trainer._metrics["train"].clear()
        # Copies, which the repeated pass changes: it may fail, too
        trainer._metrics["train"].update({name: list(values) for name, values in metrics.items()})
        trainer._total_train_tokens, trainer.counts.new = num_tokens, [*counts]
        vars(trainer).update(state)

    return put_back


def shrink(plan: Plan, error: RuntimeError) -> None:
    """Lower the budget or limit of a plan if `error` says that memory ran out in its current pass; else raise it."""
    # A pass is current from its decision on: before, a trainer may generate rows, which the plan does not decide on
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
    """Budgets and limits to try in turn: lower budgets, if the batch was computed whole; then slices of half size."""
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
    """By what decisions on a batch compare: tokens of the largest slice, then the negative of recomputed layers."""
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
