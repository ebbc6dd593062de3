"""The memory budget of a run: how many layers of each micro-batch recompute, and what no budget can hold."""

import gc
import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..flat.batch import FlatBatch, Inputs
from ..flat.counts import of_all_processes
from ..model.architecture import recomputable_layers
from ..model.flat_model import FlatModel
from ..model.routes import Route
from ..model.sequence import SequenceGroup, scored_sizes
from .device import GIB, PeakMemory, budget_bytes
from .kept_bytes import KeptBytes, count_kept_bytes, load
from .needs import HeadBytes, MemoryNeeds, fixed_bytes, needs_of, tensor_bytes

logger = logging.get_logger(__name__)

# Micro-batches whose peaks correct the prediction; and after a failed allocation, what is left of the budget
CORRECTED, AFTER_FAILURE = 8, 0.9
# Each process measures its own peaks
STATE = "memory_budget_{rank}.json"


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass under a plan."""

    batch: FlatBatch  # that needs most: a micro-batch, or a part of one beneath the loss
    number: int  # of its layers that recompute
    num_items: int  # in it, between which it may be split
    extra: int  # bytes that are needed on top
    in_parts: Sequence[int]  # layers that recompute in each part beneath the loss, all of which are computed again
    expected: int  # bytes at its peak
    held: int  # bytes before it


class MemoryBudget:
    """
    The plan of a run under `memory_budget`: decides for every micro-batch, and keeps account.

    Decisions follow from sizes that the host knows, and from what is saved with checkpoints, never from memory that
    happens to be free: a resumed run takes the same ones. `budget` are the bytes that the `option` stands for, `layers`
    those that can recompute, and `device_memory` is that of the device that trains.
    """

    def __init__(
        self,
        option: float | str,
        budget: int,
        needs: MemoryNeeds,
        layers: Sequence[GradientCheckpointingLayer],
        route: Route,
        device_memory: PeakMemory,
        group: SequenceGroup | None = None,
    ):
        self.group = group  # the processes that have to decide as this one does, because they compute a batch together
        self.option, self.budget, self.needs = option, budget, needs
        self.layers, self.route, self.device_memory = layers, route, device_memory
        self.has_shrunk = False
        self.current: Pass | None = None  # the pass that is being made, from its decision on
        self.micro_batches = self.layers_recomputed = self.predicted = 0
        self.observed, self.most_measured = 0, 0.0

    # --- decisions --------------------------------------------------------------------------------------------------

    def _load(self, batch: FlatBatch) -> np.ndarray:
        # In slices, that of the process with the most scored tokens, which all of the group know
        scored = None if self.group is None else max(scored_sizes(batch, self.group.size))
        return load(batch, self.route, self.device_memory.device, scored)

    def num_recomputed(self, batch: FlatBatch, extra: int = 0) -> int:
        """How many layers must recompute, if `extra` bytes are needed on top."""
        return self.needs.num_recomputed(self._load(batch), self.budget - extra)

    def peak(self, batch: FlatBatch, number: int) -> int:
        """Bytes at the peak if `number` layers recompute."""
        return int(self.needs.peaks(self._load(batch))[number])

    def can_hold(self, batch: FlatBatch, extra: int = 0) -> bool:
        """Whether a batch fits if all activations are recomputed."""
        return self.least(batch, extra) <= self.budget

    def keeps_all(self, batch: FlatBatch, extra: int = 0) -> bool:
        """Whether a batch fits if nothing is recomputed."""
        return self.peak(batch, 0) + extra <= self.budget

    def most_tokens(self, batch: FlatBatch) -> int:
        """The most tokens that fit, if they are scored and shared in the proportions of a batch."""
        sizes, tokens = self._load(batch), batch.counts.computed
        return self.needs.most_tokens(lambda part: np.array([1, *(sizes[1:] * part / tokens)]), self.budget)

    def least(self, batch: FlatBatch, extra: int = 0) -> int:
        """The least bytes in which a batch can be computed."""
        return int(self.needs.peaks(self._load(batch)).min()) + extra

    def least_gib(self, batch: FlatBatch, extra: int = 0) -> float:
        """The least `memory_budget` for a batch, rounded up."""
        return math.ceil(self.least(batch, extra) / GIB * 1000) / 1000

    def too_small_for(self, batch: FlatBatch, example: str, lower: str = "`max_length`", extra: int = 0) -> ValueError:
        """The error of an example that does not fit; `lower` names what makes it smaller."""
        least = self.least_gib(batch, extra)
        return ValueError(
            f"`memory_budget={self.option}` ({self.budget / GIB:.3f} GiB) is less than {example} needs: {least:.3f} "
            f"GiB for {batch.counts.computed} tokens with all activations recomputed, of which "
            f"{(self.needs.fixed + extra) / GIB:.3f} GiB are weights, gradients, the optimizer and what others hold. "
            f"Raise it to at least {least:.3f}, or lower {lower}."
        )

    def cannot_split(self, batch: FlatBatch, reason: str) -> ValueError:
        """The error of a micro-batch that does not fit, and that cannot run in parts."""
        return ValueError(
            f"`memory_budget={self.option}` ({self.budget / GIB:.3f} GiB) is less than a micro-batch of "
            f"{batch.counts.computed} tokens needs, and {reason}. Raise it to at least {self.least_gib(batch):.3f}, "
            "or lower `per_device_train_batch_size`."
        )

    def why_not_again(self, accelerator: Accelerator, is_reentrant: bool) -> str:
        """Why a micro-batch cannot be computed again after a failed allocation; empty if it can."""
        if self.current is not None and any(self.current.in_parts) and is_reentrant:
            return (
                "Layers that recompute within parts of a micro-batch add to the same gradients several times with "
                "`use_reentrant=True`, so that it cannot be computed again. Leave `use_reentrant` out."
            )
        if accelerator.num_processes > 1 or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return (
                "One process cannot compute a micro-batch again while the others wait for its gradients. Lower "
                f"`memory_budget` ({self.budget / GIB:.3f} GiB), and resume from the last checkpoint."
            )
        trained = [id(p) for layer in self.layers for p in set(layer.parameters()) if p.requires_grad]
        if len(trained) != len(set(trained)):
            return (
                "Layers that share weights add to the same gradients several times, so that a micro-batch cannot be "
                f"computed again. Lower `memory_budget` ({self.budget / GIB:.3f} GiB)."
            )
        return ""

    # --- account ----------------------------------------------------------------------------------------------------

    def start(
        self, batch: FlatBatch, number: int, num_items: int, extra: int = 0, in_parts: Sequence[int] = ()
    ) -> None:
        """
        A forward and backward pass begins, in which `number` layers recompute of a `batch` of `num_items`, and `extra`
        bytes are needed on top. It may be the largest of some, in which as many layers recompute as `in_parts` says.
        """
        expected = self.peak(batch, number) + extra
        self.current = Pass(batch, number, num_items, extra, in_parts, expected, self.device_memory.held)
        self.device_memory.reset()

    def finish(self, has_stepped: bool) -> None:
        """It ended well; `has_stepped` says whether the optimizer has its state by now."""
        made = self.current
        assert made is not None
        self.micro_batches += 1
        self.layers_recomputed += len(self.layers) if made.in_parts else made.number
        self.predicted = max(self.predicted, made.expected)
        # Without gradients and moments, the peak would look as if activations needed next to nothing
        if has_stepped and self.device_memory.can_reset and self.observed < CORRECTED:
            self._correct(made)

    def _correct(self, made: Pass) -> None:
        """Correct the prediction by a peak; downwards only once enough of them are known."""
        needs = self.needs
        self.observed += 1
        uncorrected = (made.expected - needs.fixed - made.extra) / needs.correction
        # What holds memory beside the models may have come since the plan was made
        held, peak = made.held, self.device_memory.current
        if self.group is not None:
            held, peak = self.group.largest([held, peak]).tolist()
        self.needs = needs = replace(needs, fixed=max(needs.fixed, held))
        self.most_measured = max(self.most_measured, (peak - needs.fixed - made.extra) / uncorrected)
        if self.most_measured > needs.correction or self.observed == CORRECTED:
            self.needs = replace(needs, correction=max(self.most_measured, 0.1))

    def lower(self) -> bool:
        """
        Lower the budget after a failed allocation, until another decision follows: not if nothing is left to recompute
        or to split.
        """
        assert self.current is not None
        failed, before, changed = self.current, self.budget, False
        sizes, held = self._load(failed.batch), self.needs.fixed + failed.extra
        least, budget = int(self.needs.peaks(sizes).min()) + failed.extra, min(before, failed.expected)
        while not changed and budget > held:
            budget = int(held + AFTER_FAILURE * (budget - held))
            splits = failed.num_items > 1 and budget < least
            changed = splits or self.needs.num_recomputed(sizes, budget - failed.extra) > failed.number
        if changed:
            self.budget, self.has_shrunk = budget, True
            logger.warning(
                f"An allocation failed with {failed.number} of {len(self.layers)} layers recomputed "
                f"({failed.batch.counts.computed} tokens, {failed.expected / GIB:.3f} GiB predicted). The micro-batch "
                f"is computed again, and the memory budget is {self.budget / GIB:.3f} GiB from here on, not "
                f"{before / GIB:.3f}."
            )
        return changed

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        """Figures since the last call: over all processes the mean share of layers, and the highest prediction."""
        layers, memory = [self.micro_batches * len(self.layers), self.layers_recomputed], [self.predicted, self.budget]
        gathered = of_all_processes([*layers, *(size / GIB for size in memory)], accelerator)
        self.micro_batches = self.layers_recomputed = 0
        num_layers, recomputed = gathered[:, :2].sum(0).tolist()
        if not num_layers:
            return {}
        return {
            "flat/recomputed": recomputed / num_layers,
            "flat/predicted_memory_gib": gathered[:, 2].max().item(),
            "flat/memory_budget_gib": gathered[:, 3].min().item(),
        }

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str, rank: int) -> None:
        """Save what later decisions of the process `rank` follow from."""
        needs = self.needs
        state = {"option": self.option, "budget": self.budget, "correction": needs.correction, "fixed": needs.fixed}
        state |= {"observed": self.observed, "most_measured": self.most_measured, "has_shrunk": self.has_shrunk}
        (Path(folder) / STATE.format(rank=rank)).write_text(json.dumps(state) + "\n")

    def restore(self, folder: str, rank: int) -> None:
        """Go on with what was saved, unless another budget was asked for since, or the process is new or in a group."""
        path = Path(folder) / STATE.format(rank=rank)
        if self.group is not None or not path.exists():
            return
        if (state := json.loads(path.read_text()))["option"] != self.option:
            return
        self.has_shrunk = state["has_shrunk"]
        self.budget, self.observed, self.most_measured = state["budget"], state["observed"], state["most_measured"]
        fixed = max(self.needs.fixed, state.get("fixed", 0))  # not known to 0.2.0
        self.needs = replace(self.needs, correction=state["correction"], fixed=fixed)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a recomputation gathers weights from other processes, so that all must recompute as many layers."""
    plugin = accelerator.state.deepspeed_plugin
    is_zero3 = accelerator.distributed_type == DistributedType.DEEPSPEED and plugin.zero_stage == 3
    return is_zero3 or accelerator.distributed_type == DistributedType.FSDP


def adds_up_shards(accelerator: Accelerator) -> bool:
    """Whether each backward pass adds shards of gradients up: FSDP's do, but where its first version offloads them."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return False
    plugin = accelerator.state.fsdp_plugin
    return plugin.fsdp_version > 1 or not plugin.cpu_offload.offload_params


def plan_memory(
    option: float | str,
    flat_model: FlatModel,
    device_memory: PeakMemory,
    *,
    accelerator: Accelerator,
    models: Sequence[torch.nn.Module],
    wrapped: torch.nn.Module,
    optimizer: torch.optim.Optimizer | tuple[type, dict[str, Any]],
    head: HeadBytes,
    images: Sequence[Inputs] = (),
    arguments: Inputs | None = None,
) -> MemoryBudget:
    """
    The plan of a run whose models have their weights, for `flat_model`, the one that is trained, under
    `memory_budget`, the `option`. It sets the layers that a batch tells to recompute, and refuses models that have
    none.

    `models` are all that hold weights, the trained one first, which an engine has `wrapped`. `optimizer` is the one
    that trains or, before there is one, its class and the arguments of that. `head` is what the loss puts on the model,
    `images` are arguments of calls that differ in their number, and `arguments` what training gives the model beside a
    batch.
    """
    base = flat_model.model
    layers = recomputable_layers(base, bool(images))
    if not layers:
        raise ValueError(
            f"`memory_budget={option}`: {type(base).__name__} has no layers that can recompute their "
            "activations. Leave `memory_budget` out and set `max_tokens_per_micro_batch`."
        )
    # Wrappers that gather weights have to be called; that of DDP waits for a backward pass
    call = wrapped if is_sharded(accelerator) else None
    kept = count_kept_bytes(base, flat_model.route, call, accelerator.device, images, **(arguments or {}))
    if images:  # a tower that nothing trains keeps nothing
        working = [i for i, bytes_kept in enumerate(kept.kept.sum(1)) if bytes_kept]
        layers, kept = [layers[i] for i in working], kept.of(working)
    gc.collect()  # what the check has left
    held = device_memory.held
    if isinstance(optimizer, tuple):
        made_by = optimizer
    else:
        inner: Any = optimizer
        while "optimizer" in vars(inner):  # without the wrappers of accelerate and of DeepSpeed
            inner = inner.optimizer
        states = [x for state in inner.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        held -= tensor_bytes(x for x in states if x.device.type == accelerator.device.type)
        # Defaults hold more than can be given: AdamW's have what tells it from Adam
        taken = inspect.signature(type(inner)).parameters
        made_by = type(inner), {name: x for name, x in inner.defaults.items() if name in taken}
    fixed, budget = fixed_bytes(models, made_by, held), budget_bytes(option, accelerator.device)
    if (group := flat_model.group) is not None:  # all plan for the process that needs most, and that has least
        kept = KeptBytes(*map(group.largest, vars(kept).values()))
        fixed, budget = (abs(x) for x in group.largest([fixed, -budget]).tolist())
    flat_model.recomputable = layers
    return MemoryBudget(option, budget, needs_of(kept, fixed, head), layers, flat_model.route, device_memory, group)
