"""A training step under a budget: one loop over the parts of a micro-batch, for all trainers.

If losses add up, a micro-batch above its budget is divided into parts that run one after another, each with a forward
and a backward pass of its own. A part that still does not fit, or a micro-batch in which the loss of an example depends
on others, is computed in slices beneath the loss, see [`~trl_paddingfree.slices.decoder`].
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType

from ..core.flat.batch import Inputs
from ..core.flat.counts import of_all_processes
from ..core.model.restored import attributes_set
from ..core.trainers.runtime import Step
from .attempts import Attempt, halve
from .planner import MemoryPlanner

# Methods with which losses and metrics exchange figures between processes
_COLLECTIVE = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")


@dataclass(frozen=True)
class Part:
    """A part of a micro-batch, or all of it."""

    inputs: Inputs
    # By name, the denominators of the loss ("loss") and of each averaged metric. All are 0 if the part is computed only
    # because other processes compute one; `None` if the micro-batch is not divided
    sizes: dict[str, int] | None = None
    weight: float = 1.0  # the weighted losses of all parts add up to the loss of the micro-batch


def adds_up_shards(accelerator: Accelerator) -> bool:
    """Whether each backward pass reduces and adds up gradient shards: FSDP, except FSDP1 with parameter offload."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return False
    plugin = accelerator.state.fsdp_plugin
    return plugin.fsdp_version > 1 or not plugin.cpu_offload.offload_params


@contextmanager
def synchronizing(accelerator: Accelerator, model: torch.nn.Module, is_last: bool) -> Iterator[None]:
    """A context for a part of a micro-batch: gradients of `model` are synchronized only after the last part."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # It refuses `no_sync` in some stages, and reads this flag, which all trainers of a process share
        state, sync_gradients = accelerator.gradient_state, accelerator.sync_gradients
        state._set_sync_gradients(sync_gradients and is_last)
        try:
            yield
        finally:
            state._set_sync_gradients(sync_gradients)
    else:
        skips_sync = not (is_last or adds_up_shards(accelerator))  # FSDP's `no_sync` keeps unsharded gradients
        with accelerator.no_sync(model) if skips_sync else nullcontext():
            yield


def in_one_thread(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """
    A context for passes of a model whose weights lie on several devices (`device_map`): autograd would have a thread
    for each, and where a router's loss reaches two of them, both would recompute one slice at the same time.
    """
    is_spread = len({parameter.device for parameter in model.parameters()}) > 1
    return torch.autograd.set_multithreading_enabled(False) if is_spread else nullcontext()


class PartMetrics:
    """TRL's metrics of a micro-batch that runs in parts: summed on this process, and gathered once at the end."""

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.metrics, self.tokens_before = trainer._metrics["train"], trainer._total_train_tokens
        # Per metric: the sum of its values times their sizes, the sum of sizes, and how many parts have logged it
        self.sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
        self.extremes: dict[str, list[float]] = {name: [] for name in trainer.extremes}

    @contextmanager
    def of(self, sizes: dict[str, int]) -> Iterator[None]:
        """Within this context, TRL logs a part of these `sizes`, and processes do not communicate."""
        num_logged = {name: len(values) for name, values in self.metrics.items()}
        # Processes have different numbers of parts, so that collectives would hang
        with attributes_set((self.accelerator, name, lambda tensor, *args, **kwargs: tensor) for name in _COLLECTIVE):
            yield
        for name in sizes.keys() - {"loss"}:
            self.sums[name] += 0  # even if only other processes log it: all have to gather the same names
        for name, values in self.metrics.items():
            if len(values) == num_logged.get(name, 0):
                continue
            value = values.pop()
            if name in self.extremes:
                self.extremes[name].append(value)
            elif name in sizes:
                self.sums[name] += (value * sizes[name] if sizes[name] else 0.0, sizes[name], 1)  # `nan` over 0 items
            elif name != "num_tokens" and name not in self.trainer.differences:
                raise ValueError(
                    f"{type(self.trainer).__name__} logs `{name}`, and the trainer cannot tell how to combine it "
                    "over the parts of a micro-batch. If it is a mean, name it in `part_sizes`; if not, in "
                    "`extremes` or `differences`. Or leave `memory_budget` and `max_tokens_per_micro_batch` out."
                )

    def log(self) -> None:
        """Log the metrics of the whole micro-batch, over all parts of all processes."""
        trainer, names, means = self.trainer, sorted(self.sums), {}
        for name in trainer.averaged:
            total, size, times = self.sums[name]
            self.sums[name][:] = total / max(size, 1), min(size, 1), times
        values = [x for name in names for x in self.sums[name]]
        values.append(trainer._total_train_tokens - self.tokens_before)
        totals = of_all_processes(values, self.accelerator).sum(0)
        for name, (total, size, times) in zip(names, totals[:-1].view(len(names), 3).tolist(), strict=True):
            if times:
                means[name] = total / max(size, 1)
                self.metrics[name].append(means[name])
        for name, extreme in trainer.extremes.items():
            of_each = of_all_processes([extreme(self.extremes[name])], self.accelerator)
            self.metrics[name].append(extreme(of_each[:, 0].tolist()))
        for name, (one, other) in trainer.differences.items():
            if one in means and other in means:
                self.metrics[name].append(means[one] - means[other])
        trainer._total_train_tokens = self.tokens_before + int(totals[-1])
        self.metrics["num_tokens"] = [trainer._total_train_tokens]


@dataclass(eq=False)
class TrainingSteps:
    """The training steps of a trainer under a [`~trl_paddingfree.budgets.planner.MemoryPlanner`]."""

    trainer: Any
    planner: MemoryPlanner
    part: Part | None = None  # the current part; `None` if the micro-batch is not divided
    is_weighted: bool = False  # whether the loss of this part was weighted
    attempt: Attempt = field(init=False, repr=False)  # the snapshot before the current pass
    # Whether gradients still hold what earlier parts of a micro-batch have added before a later one failed
    is_spoilt: Callable[[], bool] | None = None

    def run(self, step: Step, parts: Sequence[Part]) -> torch.Tensor:
        """
        Run TRL's `step`, a forward and a backward pass, on each part of a micro-batch, and return the sum of their
        losses. Their metrics are logged together. If memory runs out, a part is retried in smaller slices. After any
        other error, which a `training_step` of the user's may catch, none of the parts count.
        """
        self.refuse_spoilt()
        metrics = None if parts[0].sizes is None else PartMetrics(self.trainer)
        losses: list[torch.Tensor] = []
        before = None if metrics is None else Attempt(self.trainer)
        try:
            for number, part in enumerate(parts, 1):
                self.remember()
                try:
                    with self.trainer.scheduling(), in_one_thread(self.trainer.model):
                        losses.append(self._run_pass(step, part, metrics, number == len(parts)))
                finally:
                    self.attempt.finish()
            if metrics is not None:
                metrics.log()
        except BaseException:
            if before is not None:
                self._abandon(before, has_added=bool(losses))
            raise
        return torch.stack(losses).sum()

    def _abandon(self, before: Attempt, has_added: bool) -> None:
        """Have no part of a failed micro-batch count. If some `has_added` to gradients for good, training ends."""
        added, optimizer = before.abandon(), self.trainer.optimizer
        if has_added and self.trainer.is_deepspeed_enabled:  # its gradients are not those of the parameters
            self.is_spoilt = lambda: True
        elif has_added and added:
            parameter = min(added, key=torch.Tensor.numel)
            gradient = parameter.grad
            assert gradient is not None
            self.is_spoilt = lambda: parameter.grad is gradient and bool(gradient.any())
            while "optimizer" in vars(optimizer):  # unwraps that of accelerate
                optimizer = optimizer.optimizer
            optimizer.register_step_pre_hook(lambda *_: self.refuse_spoilt())

    def refuse_spoilt(self) -> None:
        """Refuse to go on with gradients of some parts of a micro-batch, unless they were set to zero since."""
        # Stays in force as long as they are there: what has caught the first error may catch this one
        if self.is_spoilt is not None and self.is_spoilt():
            raise RuntimeError(
                "A micro-batch failed after some of its parts had added to the gradients of those before it, from "
                "which they cannot be taken out. Call `trainer.model.zero_grad()` in what catches the error; or set "
                "`gradient_accumulation_steps=1`, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
            )
        self.is_spoilt = None

    def remember(self) -> None:
        """Begin a pass, which is yet to be scheduled: what it changes from here on can be rolled back."""
        self.planner.current = None
        self.attempt = Attempt(self.trainer)

    def _run_pass(self, step: Step, part: Part, metrics: PartMetrics | None, is_last: bool) -> torch.Tensor:
        """Run a part and return its loss. Without `metrics`, it is a whole micro-batch, whose metrics TRL logs."""
        trainer = self.trainer
        try:
            if metrics is None:
                loss = step(part.inputs)
            else:
                assert part.sizes is not None
                self.part, self.is_weighted = part, False
                with synchronizing(trainer.accelerator, trainer.model_wrapped, is_last), metrics.of(part.sizes):
                    loss = step(part.inputs)
                if not self.is_weighted:
                    raise ValueError(
                        f"`{type(trainer).__name__}.compute_loss` does not call `super().compute_loss`, which weights "
                        "the losses of parts: call it, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
                    )
            self.planner.finish(has_stepped=trainer.state.global_step > 0)
            return loss
        except RuntimeError as error:
            # Raised here, not by `halve`, whose frame would then hold the error, and be held by its traceback
            if not halve(self.planner, error):
                raise
        finally:
            self.part = None
        # Not within `except`: while the error lives, its frames hold the memory of the pass
        self.attempt.undo()
        self.planner.current = None  # what comes is another pass, with a peak of its own
        return self._run_pass(step, part, metrics, is_last)

    def weighted(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The loss of the current part times its weight, with the other outputs, if any."""
        assert self.part is not None
        self.is_weighted = True
        return (self.part.weight * loss[0], *loss[1:]) if isinstance(loss, tuple) else self.part.weight * loss
