"""On a failed allocation, roll back the pass and retry it in slices of half the size."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import DistributedType
from transformers.utils import logging

from ..core import upstream
from ..core.model.forward import is_allocation_failure
from .planner import MemoryPlanner

logger = logging.get_logger(__name__)

# Slices of fewer tokens are not halved
LEAST_HALVED = 16


@contextmanager
def gradients_dropped(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within this context, gradients of `parameters` are dropped as soon as they are accumulated."""
    with ExitStack() as hooks:
        for parameter in parameters:
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
        yield


class Attempt:
    """
    A snapshot of what a pass of `trainer` changes: gradients, random states, metrics, counts, and the state of TRL's
    loss.

    Gradients are not copied. A pass adds to each parameter's gradient once, so a gradient that a failed pass has
    changed is complete: it is kept, and the retry's gradient is dropped.
    """

    def __init__(self, trainer: Any):
        self.trainer, device = trainer, trainer.accelerator.device
        groups = trainer.optimizer.param_groups if trainer.optimizer else ()  # a loop of one's own may have another
        trained = {*trainer.model.parameters(), *(p for group in groups for p in group["params"])}
        # PyTorch counts in-place changes of each tensor
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in trained if p.requires_grad]
        self.random = torch.get_rng_state()
        self.device_random = None
        if device.type != "cpu":
            self.device_random = torch.get_device_module(device).get_rng_state(device)
        self.metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self.counts = [*trainer.runtime.counts.new]
        self.attributes = {name: vars(trainer)[name] for name in (*trainer.changed_by_loss, "_total_train_tokens")}
        self.has_failed = False  # whether the pass is being retried
        self.complete: dict[torch.Tensor, torch.Tensor] = {}  # gradients that a failed pass completed
        self.dropping = ExitStack()  # hooks that drop new gradients of these parameters

    def undo(self) -> None:
        """Roll back what a failed pass has changed, so that it can be retried."""
        self.has_failed = True
        self._restore_figures()
        torch.set_rng_state(self.random)
        if self.device_random is not None:
            device = self.trainer.accelerator.device
            torch.get_device_module(device).set_rng_state(self.device_random, device)
            torch.accelerator.empty_cache()
        for parameter, version in self.versions:
            gradient = parameter.grad
            if parameter not in self.complete and gradient is not None and gradient._version != version:
                self.complete[parameter] = gradient
                parameter.grad = None
                self.dropping.enter_context(gradients_dropped([parameter]))  # at once: two may not fit

    def _restore_figures(self) -> None:
        metrics = self.trainer._metrics["train"]
        metrics.clear()
        metrics.update({name: list(values) for name, values in self.metrics.items()})  # the retry may fail, too
        self.trainer.runtime.counts.new = [*self.counts]
        vars(self.trainer).update(self.attributes)

    def abandon(self) -> list[torch.nn.Parameter]:
        """
        Roll back what this pass and completed ones after it have changed, if none is to be retried. Returns the
        parameters for which this is impossible, because these passes have added to gradients from before.
        """
        self._restore_figures()
        added = []
        for parameter, version in self.versions:
            if version is None:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad._version != version:
                added.append(parameter)
        return added

    def finish(self) -> None:
        """After the pass, restore the gradients that failed attempts have completed."""
        self.dropping.close()
        for parameter, gradient in self.complete.items():
            parameter.grad = gradient


def halve(planner: MemoryPlanner, error: RuntimeError) -> bool:
    """
    Halve the slices of a planner if `error` says that memory ran out in its current pass. Returns whether they are
    smaller now. Raises an error with advice if memory ran out in a pass that cannot be computed again.
    """
    # No pass is current during generation, which the planner does not schedule
    if (failed := planner.current) is None or not is_allocation_failure(error):
        return False
    if advice := why_not_again(planner):
        raise type(error)(f"{error}\n{advice}") from error
    before = planner.limit, planner.has_shrunk
    tokens = failed.counts.computed
    size = failed.schedule.largest_slice(tokens)
    planner.limit, planner.has_shrunk = size // 2, True  # both set before planning: schedules are cached
    if planner.why_whole or size < LEAST_HALVED or planner.own_schedule(failed).largest_slice(tokens) >= size:
        planner.limit, planner.has_shrunk = before
        return False
    logger.warning(
        f"An allocation failed in a micro-batch of {tokens} tokens, in slices of up to {size}. It is computed "
        f"again, and from now on micro-batches of more than {planner.limit} tokens run in parts or slices."
    )
    return True


def why_not_again(planner: MemoryPlanner) -> str:
    """Why a pass cannot be retried after a failed allocation; empty if it can."""
    what = "`memory_budget`" if planner.needs else "`max_tokens_per_micro_batch`"
    if planner.accelerator.distributed_type != DistributedType.NO:
        return (
            "A process cannot compute a micro-batch again while others, or an engine, wait for its gradients. Lower "
            f"{what}, and resume from the last checkpoint."
        )
    hooks = (hook for p in planner.flat_model.model.parameters() for hook in upstream.hooks_after_accumulation(p))
    if any(getattr(hook, "__module__", None) != __name__ for hook in hooks):  # others than ours of an attempt before
        return (
            "A hook of yours gets gradients as soon as they are accumulated, and may have used those of this "
            f"micro-batch, which can therefore not be computed again. Leave the hook out, or lower {what}."
        )
    # Slices are not reentrant checkpoints
    if planner.is_reentrant and planner.current and not planner.current.schedule.cuts:
        return (
            "With `use_reentrant=True`, layers that share weights, or are called several times, add to a gradient more "
            f"than once in a pass, so that a micro-batch cannot be computed again. Set it to `False`, or lower {what}."
        )
    return ""
