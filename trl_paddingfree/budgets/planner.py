"""Plans the memory of a run under budgets: how each pass is computed, what it needs, and what is refused."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..capabilities import module_of
from ..core.device import GIB, PeakMemory
from ..core.flat.batch import FlatBatch
from ..core.flat.counts import of_all_processes
from ..core.flat.schedule import Schedule
from ..core.model.flat_model import FlatModel
from ..core.model.hooks import PassHook
from ..core.trainers.engine import is_sharded
from ..recomputable import recompute_first
from ..spans import cut_by_number
from .features import TOKENS, joined_features, memory_features, slice_features
from .needs import MemoryNeeds

logger = logging.get_logger(__name__)

# Where batches can be cut, and by which models. Without slices, none can
_axis, _slices = module_of("slices", "axis"), module_of("slices", "passes")

# The fewest tokens of a slice under `memory_budget`: shorter ones keep no device busy
LEAST_SLICE = 128
# How many of the first micro-batches correct the prediction by their peaks
CORRECTED = 8
# Attributes of a planner that are saved, besides what corrects its needs
_SAVED = ("limit", "budget", "has_shrunk", "observed", "most_measured")


@dataclass(eq=False)
class MemoryPlanner(PassHook):
    """
    Schedules each pass of a run, as a model begins it, under a `limit` of tokens, a `budget` in bytes, or both, and
    records what they took.

    Schedules depend on sizes that the host knows and on what checkpoints save, never on memory that happens to be free:
    a resumed run gets the same ones. `needs` are those of micro-batches under `memory_budget`, the `option`; without
    it, they are `None`, and the budget and all peaks are 0.
    """

    flat_model: FlatModel
    accelerator: Accelerator
    device_memory: PeakMemory
    limit: int | None = None
    option: float | str | None = None
    budget: int = 0
    needs: MemoryNeeds | None = None
    layers: Sequence[GradientCheckpointingLayer] = ()  # of the trained model, that may recompute
    is_reentrant: bool = False  # whether layers use reentrant checkpoints
    measures: bool = True  # whether measured peaks may correct the prediction, which resets PyTorch's peak
    has_shrunk: bool = False  # whether a failed allocation has lowered the limit
    current: FlatBatch | None = None  # the batch of the training pass under way, once it is scheduled
    held: int = 0  # bytes that tensors held before that pass
    is_interrupted: bool = False  # whether something else was computed within that pass
    # For each pass since the last log: its slices, the layers that it recomputes, and its predicted peak
    new: list[tuple[int, float, int]] = field(default_factory=list)
    # Measured peaks: how many, and the largest ratio of a measured to a predicted one
    observed: int = 0
    most_measured: float = 0.0

    def __post_init__(self) -> None:
        self.asked = [self.option, self.limit]  # a failed allocation may lower the limit
        # In a checkpoint, each process has its own file: each measures its own peaks
        self.state_file = f"memory_budget_{self.accelerator.process_index}.json"
        self.is_sharded = is_sharded(self.accelerator)
        without = f"this copy of {__package__.partition('.')[0]} is without its folder `slices`"
        self.why_whole: str = _slices.why_whole(self.flat_model) if _slices else without

    # --- schedules --------------------------------------------------------------------------------------------------

    def begin(self, flat_model: FlatModel, batch: FlatBatch) -> FlatBatch:
        """The batch, scheduled. With gradients, the trained model must have room for it."""
        trains = torch.is_grad_enabled() and flat_model is self.flat_model
        if batch.schedule == Schedule():  # else, that of whoever calls the model
            batch = self.scheduled(batch, trains)
        if trains:
            self.set_recompute(batch.schedule)
        return batch

    def set_recompute(self, schedule: Schedule) -> None:
        """Checkpoint as many of the first layers as a schedule says, whatever TRL has set."""
        if schedule.recompute is not None:
            recompute_first(self.layers, schedule.recompute)

    def scheduled(self, batch: FlatBatch, trains: bool) -> FlatBatch:
        """A batch with its schedule. If it `trains`, it must fit, and its pass begins."""
        own = self.own_schedule(batch)
        # Processes that gather weights together agree on a schedule
        schedule = self._agreed(batch, own) if self.is_sharded else own
        batch = _slices.scheduled(batch, schedule) if _slices else replace(batch, schedule=schedule)
        if trains:
            if self.why_whole:
                self.refuse_oversized(batch.counts.computed)
            if batch.schedule.peak > self.budget and not self.has_shrunk:
                raise self.too_small_for(batch)
            if self.current is None:  # a loss of one's own may call the model more than once
                self.held = self.device_memory.begin() if self.corrects else 0
                self.is_interrupted = False
            self.current = batch
        return batch

    def own_schedule(self, batch: FlatBatch) -> Schedule:
        """The schedule of this process alone: whole, with as few recomputed layers as fit, or else in slices."""
        # Cached in the layout, from whose lengths it follows
        return batch.layout.derived(("schedule", self.budget, self.limit), partial(self._decide, batch))

    def _decide(self, batch: FlatBatch) -> Schedule:
        tokens = batch.counts.computed
        number, peak = None, 0
        if self.needs is not None:
            number, peak = self.needs.fewest_recomputed(self.features(batch), self.budget)
        if self.why_whole or self._holds(tokens, peak):
            return Schedule(recompute=number, peak=peak)  # refused if it trains and does not fit
        tried = []
        high = min(self.limit or tokens, tokens)
        for low in _axis.sizes_to_try(batch.layout.segments, high, LEAST_SLICE):
            tried.append(self._cut(batch, low))
            if tried[-1].peak <= self.budget:
                break
            high = low
        best = min(tried, key=lambda schedule: schedule.peak)
        # The largest slices that fit, to within an eighth: they keep devices busier, and recompute no more
        while high - low > max(1, low // 8) and best.peak <= self.budget:
            middle = (low + high) // 2
            if (larger := self._cut(batch, middle)).peak <= self.budget:
                best, low = larger, middle
            else:
                high = middle
        # Processes that gather weights together must recompute together; a failed allocation leaves nothing to spare
        return best if self.is_sharded or self.has_shrunk else self._in_slices(batch, best.cuts, keeps=True)

    def _agreed(self, batch: FlatBatch, own: Schedule) -> Schedule:
        """The schedule of all processes: the most slices, or the most recomputed layers, that any of them needs."""
        counts = torch.tensor([[own.num_slices, own.recompute or 0]], device=self.accelerator.device)
        # Not `accelerator.gather`, which does nothing while `PartMetrics` collects the metrics of a part
        number, layers = map(int, gather(counts).amax(0).tolist())
        if number > own.num_slices:
            return self._in_slices(batch, cut_by_number(batch.counts.computed, number, batch.layout.host_blocks))
        if number > 1 or self.needs is None:
            return own
        return Schedule(recompute=layers, peak=int(self.needs.peaks(self.features(batch))[layers]))

    def _holds(self, tokens: int, peak: int) -> bool:
        """Whether `tokens` and `peak` are within the limit and the budget."""
        return (self.limit is None or tokens <= self.limit) and peak <= self.budget

    def _cut(self, batch: FlatBatch, size: int) -> Schedule:
        """The schedule in slices of at most `size` tokens."""
        return self._in_slices(batch, _axis.cut_by_size(batch.layout.segments, size, batch.layout.host_blocks))

    def _in_slices(self, batch: FlatBatch, cuts: tuple[int, ...], keeps: bool = False) -> Schedule:
        """
        The schedule for slices. Only the last keeps its activations or, with `keeps`, as many of the last ones as fit.
        No layer recomputes by itself within slices nor, under `memory_budget`, in the vision tower.
        """
        # Not in chunks if weights are sharded: each call of the head gathers its weights
        chunk = None if self.is_sharded else int(np.diff(cuts).max())
        if self.needs is None:
            return Schedule(cuts, head_chunk=chunk)
        slices = slice_features(batch.layout.segments, cuts, self.flat_model.route)
        stays = _axis.kept_keys(batch.layout.segments, cuts, self.needs.per_feature.windows)
        peaks = self.needs.peaks_of_slices(slices, stays, self.features(batch), chunk)
        kept = max(int((peaks <= self.budget).sum()), 1) if keeps else 1
        return Schedule(cuts, 0, chunk, int(peaks[kept - 1]), kept)

    def features(self, batch: FlatBatch) -> np.ndarray:
        """The features of a batch from which its memory is predicted."""
        # Those of the process with the most scored tokens: all that compute the batch must decide alike
        shares, _ = self.flat_model.peers.shares(batch)
        return memory_features(batch, self.flat_model.route, max(shares))

    def parts(self, examples: Sequence[np.ndarray]) -> list[list[int]]:
        """
        Divide a micro-batch whose losses add up into parts, as few as first-fit finds, by the features of each example.
        Returns the examples of each part. One that does not fit by itself gets its own part, computed in slices.
        """
        parts: list[list[int]] = []
        sums: list[np.ndarray] = []
        for item in sorted(range(len(examples)), key=lambda i: -examples[i][TOKENS]):
            for i, total in enumerate(sums):
                joined = joined_features(total, examples[item], self.flat_model.route)
                peak = 0 if self.needs is None else int(self.needs.peaks(joined).min())
                if self._holds(joined[TOKENS], peak):
                    parts[i].append(item)
                    sums[i] = joined
                    break
            else:
                parts.append([item])
                sums.append(examples[item])
        return [sorted(part) for part in parts]

    def is_whole(self, batch: FlatBatch) -> bool:
        """Whether a batch is computed whole, and fits."""
        schedule = self.own_schedule(batch)
        return not schedule.cuts and self._holds(batch.counts.computed, schedule.peak)

    # --- what no budget can hold ------------------------------------------------------------------------------------

    def least_bytes(self, batch: FlatBatch) -> int:
        """The least bytes in which a batch can be computed."""
        assert self.needs is not None
        tokens = batch.counts.computed
        peaks = []
        if self.why_whole or self._holds(tokens, 0):
            peaks.append(int(self.needs.peaks(self.features(batch)).min()))
        if not self.why_whole:
            sizes = _axis.sizes_to_try(batch.layout.segments, min(self.limit or tokens, tokens), LEAST_SLICE)
            peaks += [self._cut(batch, size).peak for size in sizes]
        return min(peaks)

    def too_small_for(self, batch: FlatBatch, name: str = "a micro-batch", lower: str = "`max_length`") -> ValueError:
        """The error for a batch that does not fit; `lower` names the option to lower."""
        assert self.needs is not None
        least = math.ceil(self.least_bytes(batch) / GIB * 1000) / 1000
        how = f"with all activations recomputed, as {self.why_whole}" if self.why_whole else "in slices"
        return ValueError(
            f"`memory_budget={self.option}` ({self.budget / GIB:.3f} GiB) is less than {name} needs: {least:.3f} "
            f"GiB for {batch.counts.computed} tokens {how}. Weights, gradients, the optimizer and what others hold "
            f"take {self.needs.fixed / GIB:.3f} GiB of that. Raise it to at least {least:.3f}, or lower {lower}."
        )

    def refuse_oversized(self, tokens: int, name: str = "a micro-batch") -> None:
        """Refuse more tokens than the limit on a model that cannot compute slices (`why_whole` gives the reason)."""
        if self.why_whole and not self._holds(tokens, 0):
            raise ValueError(
                f"`max_tokens_per_micro_batch={self.limit}` is less than {name} needs ({tokens} tokens), and it cannot "
                f"be computed in slices: {self.why_whole}. Raise it, or lower `per_device_train_batch_size` or "
                "`max_length`."
            )

    # --- account ----------------------------------------------------------------------------------------------------

    @property
    def corrects(self) -> bool:
        """Whether measured peaks still correct the prediction: only those of the first micro-batches do."""
        return self.needs is not None and self.measures and self.device_memory.can_reset and self.observed < CORRECTED

    def finish(self, has_stepped: bool) -> None:
        """Record a completed pass. `has_stepped` says whether the optimizer has its state by now."""
        if (current := self.current) is None:  # no training pass was computed
            return
        tokens, schedule = current.counts.computed, current.schedule
        # The share of tokens whose slices are computed once more
        again = schedule.cuts[-1 - schedule.kept_slices] / tokens if schedule.cuts else 0.0
        recomputed = (schedule.recompute or 0) + again * len(self.layers)
        self.new.append((schedule.num_slices, recomputed, schedule.peak))
        # Before gradients and moments exist, the peak would look as if activations needed next to nothing
        if has_stepped and self.corrects and not self.is_interrupted:
            self._correct(schedule.peak)

    def interrupted(self) -> None:
        self.is_interrupted = True

    def _correct(self, predicted: int) -> None:
        """Correct the prediction by the peak of a pass; downward only once `CORRECTED` peaks are known."""
        needs = self.needs
        assert needs is not None
        self.observed += 1
        uncorrected = (predicted - needs.fixed) / needs.correction
        # Other tensors may have been allocated since the needs were counted
        held, peak = self.flat_model.peers.largest([self.held, self.device_memory.peak]).tolist()
        self.needs = needs = replace(needs, fixed=max(needs.fixed, held))
        self.most_measured = max(self.most_measured, (peak - needs.fixed) / uncorrected)
        if self.most_measured > needs.correction or self.observed == CORRECTED:
            self.needs = replace(needs, correction=max(self.most_measured, 0.1))

    def figures(self) -> dict[str, float]:
        """Figures since the last call, over all processes: mean slices and layers, highest prediction, least budget."""
        slices_of, layers_of, peaks = zip((0, 0.0, 0), *self.new, strict=True)
        gathered = of_all_processes(
            [len(self.new), sum(slices_of), sum(layers_of), max(peaks) / GIB, self.budget / GIB], self.accelerator
        )
        self.new = []
        number, slices, recomputed = gathered[:, :3].sum(0).tolist()
        if not number:
            return {}
        figures = {"flat/slices": slices / number}
        if self.needs is None:
            return figures
        return figures | {
            "flat/recomputed": recomputed / number / len(self.layers),
            "flat/predicted_memory_gib": gathered[:, 3].max().item(),
            "flat/memory_budget_gib": gathered[:, 4].min().item(),
        }

    def save(self, folder: str) -> None:
        """Save what later schedules of this process depend on."""
        state = {"asked": self.asked, **{name: vars(self)[name] for name in _SAVED}}
        if self.needs is not None:
            state |= {"correction": self.needs.correction, "fixed": self.needs.fixed}
        Path(folder, self.state_file).write_text(json.dumps(state) + "\n")

    def restore(self, folder: str) -> None:
        """Restore what was saved, unless the budgets asked for have changed, or the process is new or in a group."""
        path = Path(folder, self.state_file)
        if self.flat_model.peers.name or not path.exists():
            return
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state.get("asked") != self.asked:  # releases before 0.5 did not save it
                return
            saved, needs = {name: state[name] for name in _SAVED}, self.needs
            if needs is not None:
                needs = replace(needs, correction=state["correction"], fixed=max(needs.fixed, state["fixed"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # losses do not depend on it
            logger.warning(
                f"{path} cannot be read ({type(error).__name__}: {error}): the budget is planned anew. Delete the file "
                "to silence this."
            )
            return
        vars(self).update(saved)
        self.needs = needs
