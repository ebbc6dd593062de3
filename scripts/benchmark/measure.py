"""Training steps of several trainers, which take turns on the same rows: their times, figures, work and memory."""

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from trl import pack_dataset

from trl_paddingfree.core.device import PeakMemory
from trl_paddingfree.core.flat.batch import IGNORE_INDEX
from trl_paddingfree.core.trainers.engine import base_of

from .flops import StepCost, Work, flop_counter, slots_of_state_layers
from .tasks import PACKED, Method, Settings

# Unscored and scored tokens of the examples whose operations are counted, to solve for the cost of each unit of work
PROBES = ((8, 1), (8, 9), (40, 1), (24, 9))
# The gather of keys and values that shared prefixes need, and its gradient, as the profiler names them
GATHER = ("Gather", "GatherBackward")
# Names of PyTorch's operators that compute attention; `scaled_dot_product_attention` only chooses one of them
ATTENTION = re.compile(r"::_\w*(attention|attn)")
LONGEST = 12  # operations that a profile lists
MATMUL_SIZES, MATMUL_SIZES_ON_CPU = (4096, 8192), (512, 1024, 2048)


def now(device: str) -> float:
    """The time in seconds, after waiting for all work that is queued on the device."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per second of square matrix products: the best of several sizes."""
    best = 0.0
    for n in MATMUL_SIZES_ON_CPU if device == "cpu" else MATMUL_SIZES:
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        best = max(best, 2 * n**3 / min(timer.blocked_autorange(min_run_time=0.5).times))
    return best


class Clock:
    """
    Times the parts of a step, one after the other.

    The device is synchronized where one part ends and the next begins; TRL's own metrics synchronize it more often.
    """

    def __init__(self, device: str):
        self.device = device
        self.seconds: dict[str, float] = {}  # of each part
        self.last, self.started = now(device), time.process_time()
        # CPU time of all threads of this process. Other processes on the machine do not add to it, but threads that
        # wait for each other do
        self.core_seconds = 0.0

    def mark(self, part: str) -> None:
        """End the part that began at the last mark."""
        current = now(self.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + current - self.last
        self.core_seconds = time.process_time() - self.started
        self.last = current


@dataclass
class Step:
    """One training step of one method."""

    seconds: dict[str, float]  # "data": the collator, and the way to the device; "forward", "backward", "optimizer"
    figures: dict[str, float]  # loss, gradient norm and TRL's metrics
    core_seconds: float  # see `Clock`
    bytes_above: int  # most memory allocated during the step, above what was before it; 0 where PyTorch does not say
    work: Work

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


class Runner:
    """Steps the trainer of a method, from rows to updated weights, through TRL's own `training_step`."""

    def __init__(self, method: Method, trainer: Any, settings: Settings, unpadded_attention: bool):
        self.method, self.trainer, self.settings = method, trainer, settings
        self.unpadded_attention = unpadded_attention
        self.clock = Clock(settings.device)
        # Asked for before `backward` is replaced, beside which nothing would run in parts
        self.collate = trainer.get_train_dataloader().collate_fn
        backward = trainer.accelerator.backward

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            self.clock.mark("forward")
            backward(*args, **kwargs)
            self.clock.mark("backward")  # another part of the micro-batch may follow, with a forward pass of its own

        trainer.accelerator.backward = timed_backward

    def arrange(self, batches: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """The batches that this method makes of the rows of these: packing makes fewer and fuller ones."""
        if self.method.options != PACKED:
            return batches
        rows = Dataset.from_list([row for batch in batches for row in batch])
        packed = list(pack_dataset(rows, self.settings.max_length, "bfd"))
        size = self.settings.batch_size
        return [packed[first : first + size] for first in range(0, len(packed), size)]

    def on_device(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The examples as a data loader gives them to the trainer: collated, and on the device."""
        return self.trainer._prepare_inputs(self.collate(examples))

    def gradients(self, batch: dict[str, Any]) -> torch.Tensor:
        """Forward and backward pass, as the training loop does them. Returns the loss."""
        trainer = self.trainer
        batches, num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        return trainer.training_step(trainer.model_wrapped, batches[0], num_items)

    def step(self, examples: list[dict[str, Any]]) -> Step:
        """One training step."""
        trainer = self.trainer
        # Under a budget, the trainer resets the peak for each part, and its own `peak_memory` remembers the highest
        flat = vars(trainer).get("flat")
        peak = PeakMemory(torch.device(self.settings.device)) if flat is None else flat.peak_memory
        peak.begin()
        peak.before, before = 0, peak.held
        self.clock = Clock(self.settings.device)
        collated = self.collate(examples)
        batch = trainer._prepare_inputs(collated)
        self.clock.mark("data")
        loss = self.gradients(batch)
        self.clock.mark("backward")
        grad_norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        self.clock.mark("optimizer")
        bytes_above = peak.highest - before if peak.can_reset else 0
        trainer.log({"loss": loss.item(), "grad_norm": float(grad_norm)})
        figures = dict(trainer.state.log_history[-1])
        return Step(self.clock.seconds, figures, self.clock.core_seconds, bytes_above, self.work(collated))

    def try_out(self, batches: list[list[dict[str, Any]]]) -> None:
        """Forward and backward pass of the batch with the most padded slots: an error says that it does not fit."""
        self.watch(max(batches, key=lambda examples: self.collate(examples)["input_ids"].numel()), nullcontext())

    def watch(self, examples: list[dict[str, Any]], context: AbstractContextManager[Any]) -> Any:
        """Forward and backward pass within a context, as no training step. Returns what the context gives."""
        batch = self.on_device(examples)
        try:
            with context as given:
                self.gradients(batch)
        finally:
            self.trainer.model.zero_grad()
            self.trainer.log({})  # drops the figures
        return given

    def mean_loss(self, batches: list[list[dict[str, Any]]], model: Any) -> float:
        """Loss of a model per scored token over all batches, without training on them. SFT only."""
        losses, counts = [], []
        for examples in batches:
            batch = self.on_device(examples)
            counts.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                losses.append(float(self.trainer.compute_loss(model, batch)))
        self.trainer.log({})
        return float(np.average(losses, weights=counts))

    def reference(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The examples with the reference model's log-probabilities. DPO only."""
        chosen, rejected = self.trainer.compute_ref_log_probs(self.trainer.model_wrapped, self.on_device(examples))
        return [
            {**example, "ref_chosen_logps": c, "ref_rejected_logps": r}
            for example, c, r in zip(examples, chosen.tolist(), rejected.tolist(), strict=True)
        ]

    def work(self, batch: dict[str, Any]) -> Work:
        """What the trainer computes of a collated batch."""
        if "flat_batch" in batch:
            flat_batch, in_calls = batch["flat_batch"], self.trainer.runtime.route.backend == "segment"
            base = base_of(self.trainer.accelerator, self.trainer.model)
            in_rows = slots_of_state_layers(base, flat_batch.layout)
            return replace(Work.flat(flat_batch, in_calls=in_calls), in_rows=in_rows)
        compact = self.settings.device in ("cuda", "xpu")  # where TRL's fused head computes scored positions only
        is_scored = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != IGNORE_INDEX
        scored = int(is_scored[:, 1:].sum())
        if "cu_seq_lens_q" in batch:  # TRL's flat row
            lengths, tokens = batch["cu_seq_lens_q"].diff().tolist(), batch["input_ids"].size(1)
            pairs = sum(n * n for n in lengths) if self.unpadded_attention else tokens * tokens
            return Work(tokens, pairs, scored if compact else tokens - 1, in_rows=tokens)
        lengths = batch["attention_mask"].sum(1).tolist()
        return Work.padded(lengths, scored, unpadded_attention=self.unpadded_attention, compact_head=compact)

    def count(self, examples: list[dict[str, Any]]) -> tuple[Work, int]:
        """Work and counted operations of a forward and backward pass, which leave no gradients behind."""
        flops = self.watch(examples, flop_counter()).get_total_flops()
        return self.work(self.collate(examples)), flops

    def cost(self, recompute: bool = True) -> StepCost:
        """
        Operations per unit of work of this trainer's step, with what gradient checkpointing computes twice, or without.

        Only our trainers can be asked. In padded batches, numbers of tokens, pairs and scored tokens depend on each
        other, so that they do not tell the units apart.
        """
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        is_changed = self.settings.gradient_checkpointing and not recompute
        if is_changed:
            model.gradient_checkpointing_disable()
        cost = StepCost.solve([self.count([self.settings.probe(*n)]) for n in PROBES])
        if is_changed:
            model.gradient_checkpointing_enable(self.trainer.args.gradient_checkpointing_kwargs)
        return cost

    def bytes_of_state(self) -> int:
        """Memory of weights, the reference model's included, and optimizer state."""
        trainer = self.trainer
        models = [trainer.model, *([trainer.ref_model] if getattr(trainer, "ref_model", None) is not None else [])]
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        tensors += [x for state in trainer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    def syncs(self, examples: list[dict[str, Any]]) -> int:
        """Times that a forward and backward pass makes the host wait for the GPU."""
        return self.watch(examples, count_syncs())()

    def attention_operators(self, examples: list[dict[str, Any]]) -> list[str]:
        """PyTorch's names of the operators that compute attention in a forward and backward pass: which kernels run."""
        profiler = self.watch(examples, profile(activities=[ProfilerActivity.CPU]))
        return sorted({event.key for event in profiler.key_averages() if ATTENTION.search(event.key)})

    def profile(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Where the time of a training step on the device goes: the largest `"operations"`, and the `"gather"` of keys and
        values with its gradient, as shares; on a CPU, also `"bytes_above"`, as in [`Step`]. Empty where the profiler
        may not read the device's times.
        """
        on_accelerator = self.settings.on_accelerator
        device = "device_" if on_accelerator else "cpu_"
        with profile(profile_memory=not on_accelerator) as profiler:  # of the CPU, and of what accelerator there is
            self.step(examples)
        # Kernels are listed too, but their time already counts for the operations that launched them
        events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
        own = {event.key: getattr(event, f"self_{device}time_total") for event in events}
        total = sum(own.values())
        if not total:
            return {}
        ranked = sorted(own, key=lambda key: -own[key])[:LONGEST]
        gather = sum(getattr(event, f"{device}time_total") for event in events if event.key in GATHER)
        found = {"operations": {key: own[key] / total for key in ranked}, "gather": gather / total}
        return found if on_accelerator else {**found, "bytes_above": most_allocated(profiler)}


def most_allocated(profiler: profile) -> int:
    """Most memory on the CPU that was allocated while a profiler watched it, above what was before."""
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return int(np.cumsum([0, *changes]).max())


@contextmanager
def count_syncs() -> Iterator[Any]:
    """Count the operations that make the host wait for a CUDA device. Yields a function that gives the count."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def interleave(runners: list[Runner], batches: list[list[dict[str, Any]]], rounds: int) -> dict[str, list[list[Step]]]:
    """
    Step all runners in turn. Returns the steps of each method, by round and batch.

    Each batch is trained on by one method after the other, in an order that rotates, so that whatever else the machine
    does meets all methods alike. Packing, which makes other batches of the same rows, takes its turns while it has any.
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
