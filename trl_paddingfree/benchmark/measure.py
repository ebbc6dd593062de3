"""Step several trainers in turn on the same rows, compare what they compute, and time them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import pack_dataset

from ..flat.batch import IGNORE_INDEX
from ..model.state_layers import carries_state, slots_of_state_layers
from ..trainers.proving import base_of
from .clock import Clock
from .flops import StepCost, Work, count_flops
from .methods import Settings
from .tasks import PACKED, Method

# Largest relative differences of two methods' figures. Means over the scored tokens of a batch average rounding out
# (a token's log-probability is off by about eps, 1.2e-7 or 4e-3, and up as often as down), while the context of
# another row, even under random weights, moves a token by about a nat and the mean over a thousand tokens by some 3e-3.
# The DPO loss is the small difference of large sums, and gradients do not average: they are compared loosely.
TOLERANCES = {
    "float32": {"logps/chosen": 1e-4, "logps/rejected": 1e-4, "entropy": 1e-4, "loss": 1e-3, "grad_norm": 1e-3},
    "bfloat16": {"logps/chosen": 1e-3, "logps/rejected": 1e-3, "entropy": 1e-3, "loss": 5e-2, "grad_norm": 5e-2},
}


# Unscored and scored tokens of the batches by which the cost per unit of work is found
PROBES = ((8, 1), (8, 9), (40, 1), (24, 9))


def tolerances(settings: Settings) -> dict[str, float]:
    """Largest relative difference of each figure that is compared."""
    allowed = TOLERANCES[settings.dtype]
    return {**allowed, "loss": allowed["entropy"]} if settings.benchmarked.averages_loss else allowed


@dataclass
class Step:
    """
    One training step of one method.

    Args:
        seconds (`dict[str, float]`):
            Time of `"data"` (the collator), `"forward"`, `"backward"` and `"optimizer"`.
        figures (`dict[str, float]`):
            Loss, gradient norm and TRL's metrics.
        core_seconds (`float`):
            Time that the process had cores during the step, see [`Clock`].
        bytes_above (`int`):
            Most memory allocated during the step, above what was allocated before it. 0 where PyTorch does not say.
        work ([`Work`]):
            What was computed.
    """

    seconds: dict[str, float]
    figures: dict[str, float]
    core_seconds: float
    bytes_above: int
    work: Work

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


class Runner:
    """
    Steps one trainer, from rows to updated weights, through TRL's own `training_step`.

    Args:
        method ([`Method`]):
            The method.
        trainer ([`~transformers.Trainer`]):
            Its trainer, after [`make_trainer`].
        settings ([`Settings`]):
            What all methods have in common.
        unpadded_attention (`bool`):
            Whether the attention of TRL's own methods leaves padding out.
    """

    def __init__(self, method: Method, trainer: Any, settings: Settings, unpadded_attention: bool):
        self.method, self.trainer, self.settings = method, trainer, settings
        self.unpadded_attention = unpadded_attention
        self.clock = Clock(settings.device)
        backward = trainer.accelerator.backward

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            self.clock.mark("forward")
            backward(*args, **kwargs)
            self.clock.mark("backward")  # another part of the micro-batch may follow, with a forward pass of its own

        trainer.accelerator.backward = timed_backward

    def arrange(self, batches: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """The batches that this method makes of the same rows: packing makes fewer and fuller ones."""
        if self.method.options != PACKED:
            return batches
        rows = Dataset.from_list([row for batch in batches for row in batch])
        packed = list(pack_dataset(rows, self.settings.max_length, "bfd"))
        size = self.settings.batch_size
        return [packed[first : first + size] for first in range(0, len(packed), size)]

    def mean_loss(self, batches: list[list[dict[str, Any]]], model: Any) -> float:
        """Loss of a model per scored token over all batches, without training on them. SFT only."""
        trainer, losses, counts = self.trainer, [], []
        for examples in batches:
            batch = trainer._prepare_inputs(trainer.data_collator(examples))
            counts.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
            with torch.no_grad(), trainer.compute_loss_context_manager():
                losses.append(float(trainer.compute_loss(model, batch)))
        trainer.log({})
        return float(np.average(losses, weights=counts))

    def reference(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The examples with the reference model's log-probabilities. DPO only."""
        batch = self.trainer._prepare_inputs(self.trainer.data_collator(examples))
        chosen, rejected = self.trainer.compute_ref_log_probs(self.trainer.model_wrapped, batch)
        return [
            {**example, "ref_chosen_logps": c, "ref_rejected_logps": r}
            for example, c, r in zip(examples, chosen.tolist(), rejected.tolist(), strict=True)
        ]

    def gradients(self, batch: dict[str, Any]) -> torch.Tensor:
        """Forward and backward pass, as the training loop does them. Returns the loss."""
        trainer = self.trainer
        batches, num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        return trainer.training_step(trainer.model_wrapped, batches[0], num_items)

    def step(self, examples: list[dict[str, Any]]) -> Step:
        """One training step."""
        trainer, cuda = self.trainer, self.settings.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        self.clock = Clock(self.settings.device)
        batch = trainer.data_collator(examples)
        self.clock.mark("data")
        loss = self.gradients(batch)
        self.clock.mark("backward")
        grad_norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        self.clock.mark("optimizer")
        bytes_above = torch.cuda.max_memory_allocated() - before if cuda else 0
        trainer.log({"loss": loss.item(), "grad_norm": float(grad_norm)})
        figures = dict(trainer.state.log_history[-1])
        return Step(self.clock.seconds, figures, self.clock.core_seconds, bytes_above, self.work(batch))

    def work(self, batch: dict[str, Any]) -> Work:
        """What the trainer computes of a collated batch."""
        if "flat_batch" in batch:
            flat_batch, in_calls = batch["flat_batch"], self.trainer.flat.route.backend == "segment"
            in_rows = slots_of_state_layers(self.base, flat_batch.layout)
            return replace(Work.flat(flat_batch, in_calls=in_calls), in_rows=in_rows)
        work = self._work_of_trl(batch)
        return replace(work, in_rows=work.tokens if carries_state(self.base) else 0)

    @property
    def base(self) -> Any:
        """The transformers model under its wrappers."""
        return base_of(self.trainer.accelerator, self.trainer.model)

    def _work_of_trl(self, batch: dict[str, Any]) -> Work:
        """What TRL's own methods compute of a collated batch."""
        compact = self.settings.device == "cuda"
        if "completion_mask" in batch:
            scored = int(batch["completion_mask"][:, 1:].sum())
        else:
            scored = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        if "cu_seq_lens_q" in batch:  # TRL's flat row
            lengths, tokens = batch["cu_seq_lens_q"].diff().tolist(), batch["input_ids"].size(1)
            pairs = sum(n * n for n in lengths) if self.unpadded_attention else tokens * tokens
            return Work(tokens, pairs, scored if compact else tokens - 1)
        lengths = batch["attention_mask"].sum(1).tolist()
        return Work.padded(lengths, scored, unpadded_attention=self.unpadded_attention, compact_head=compact)

    def count(self, examples: list[dict[str, Any]]) -> tuple[Work, int]:
        """Work and counted operations of a forward and backward pass, which leave no gradients behind."""
        batch = self.trainer.data_collator(examples)
        work = self.work(batch)
        flops = count_flops(lambda: self.gradients(batch))
        self.forget()
        return work, flops

    def fits(self, batches: list[list[dict[str, Any]]]) -> bool:
        """Whether the batch of most padded slots fits. Tried on GPUs, with TRL's own methods that recompute nothing."""
        if self.settings.device != "cuda" or self.method.ours or not self.method.keeps:
            return True
        try:
            self.gradients(max(map(self.trainer.data_collator, batches), key=lambda batch: batch["input_ids"].numel()))
        except torch.OutOfMemoryError:
            return False
        finally:
            self.forget()
        return True

    def cost(self, recompute: bool = True) -> StepCost:
        """
        Operations per unit of work of this trainer's step. Ours only: other layouts cannot vary all three units.

        Args:
            recompute (`bool`, *optional*, defaults to `True`):
                Whether to count what gradient checkpointing computes twice.
        """
        with checkpointing_off(self.trainer) if not recompute else warnings.catch_warnings():
            return StepCost.solve([self.count([probe_example(self.settings, *n)]) for n in PROBES])

    def syncs(self, examples: list[dict[str, Any]]) -> int:
        """Times that a forward and backward pass makes the host wait for the GPU."""
        batch = self.trainer._prepare_inputs(self.trainer.data_collator(examples))
        with count_syncs() as count:
            self.gradients(batch)
        self.forget()
        return count()

    def forget(self) -> None:
        """Drop the gradients and the figures of a pass that is no training step."""
        self.trainer.model.zero_grad()
        self.trainer.log({})

    def bytes_of_state(self) -> int:
        """Memory of weights, the reference model's included, and optimizer state."""
        trainer = self.trainer
        models = [trainer.model, *([trainer.ref_model] if getattr(trainer, "ref_model", None) is not None else [])]
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        tensors += [x for state in trainer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


@contextmanager
def checkpointing_off(trainer: Any) -> Iterator[None]:
    """Within this context, activations are kept rather than recomputed."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_on = trainer.args.gradient_checkpointing
    if was_on:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        if was_on:
            model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)


@contextmanager
def count_syncs() -> Iterator[Any]:
    """Count the operations that make the host wait for the GPU. Yields a function that gives the count."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def probe_example(settings: Settings, unscored: int, scored: int) -> dict[str, Any]:
    """An example with given numbers of unscored and scored tokens in its longest row."""
    example = settings.benchmarked.probe(unscored, scored)
    if settings.precomputed_reference:
        example |= {"ref_chosen_logps": -1.0, "ref_rejected_logps": -1.0}
    return example


@dataclass
class Comparison:
    """
    Where two methods' figures differ.

    Args:
        largest (`dict[str, float]`):
            Largest relative difference of each figure.
        allowed (`dict[str, float]`):
            Largest that is allowed.
    """

    allowed: dict[str, float]
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, expected: dict[str, float], actual: dict[str, float]) -> None:
        """Compare the figures of one step."""
        for name in self.allowed:
            if name in expected:
                difference = abs(expected[name] - actual[name]) / max(abs(expected[name]), 1e-6)
                self.largest[name] = max(self.largest.get(name, 0.0), difference)

    @property
    def agrees(self) -> bool:
        """Whether every figure of every step is within the tolerance."""
        return bool(self.largest) and all(value <= self.allowed[name] for name, value in self.largest.items())


def interleave(runners: list[Runner], batches: list[list[dict[str, Any]]], rounds: int) -> dict[str, list[list[Step]]]:
    """
    Step all runners in turn.

    Each batch is trained on by one method after the other, in an order that rotates, so that whatever else the machine
    does meets all methods alike. Packing, which makes other batches of the same rows, takes its turns while it has any.

    Args:
        runners (`list[Runner]`):
            The methods.
        batches (`list[list[dict[str, Any]]]`):
            The batches, the same for all methods.
        rounds (`int`):
            Times to go through the batches.

    Returns:
        `dict[str, list[list[Step]]]`: For each method, its steps, by round and batch.
    """
    steps: dict[str, list[list[Step]]] = {runner.method.name: [[] for _ in range(rounds)] for runner in runners}
    arranged = {runner.method.name: runner.arrange(batches) for runner in runners}
    for turn in range(rounds):
        for number in range(len(batches)):
            first = (turn + number) % len(runners)
            for runner in runners[first:] + runners[:first]:
                own = arranged[runner.method.name]
                if number < len(own):
                    steps[runner.method.name][turn].append(runner.step(own[number]))
    return steps
