"""The plan of a run under budgets: how each pass is computed, what it needs, and what is refused."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather

from ..flat.batch import FlatBatch
from ..flat.counts import of_all_processes
from ..flat.slices import cut_by_number, cut_by_size, num_kept, sizes_to_try
from ..model.flat_model import Decision, FlatModel
from ..model.routes import why_not_in_slices
from ..model.sequence import scored_sizes
from .device import GIB, PeakMemory
from .engine import is_sharded
from .features import SCORED, TOKENS, joined_features, memory_features, slice_features
from .needs import MemoryNeeds

# The least tokens of a slice under `memory_budget`: shorter ones keep no device busy
LEAST_SLICE = 128
# How many first micro-batches correct the prediction by their peaks
CORRECTED = 8
# The file of each process in a checkpoint: each measures its own peaks
STATE = "memory_budget_{rank}.json"
# What is saved of a plan, besides what corrects its needs
_SAVED = ("limit", "budget", "has_shrunk", "observed", "most_measured")


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass under a plan."""

    batch: FlatBatch
    decision: Decision
    held: int  # bytes that tensors held before it


class Plan:
    """
    The plan of a run: decides how each pass computes a batch, under a `limit` of tokens, a `budget` in bytes, or both.
    The one owner of such decisions, which keeps account of what follows from them.

    Decisions follow from sizes that the host knows, and from what is saved with checkpoints, never from memory that
    happens to be free: a resumed run takes the same ones. `needs` are those of micro-batches under `memory_budget`, the
    `option`; without it, they are `None`, and the budget, with all peaks, is 0.
    """

    def __init__(
        self,
        flat_model: FlatModel,
        accelerator: Accelerator,
        device_memory: PeakMemory,
        *,
        limit: int | None = None,
        option: float | str | None = None,
        budget: int = 0,
        needs: MemoryNeeds | None = None,
        is_reentrant: bool = False,
    ):
        self.flat_model, self.accelerator, self.device_memory = flat_model, accelerator, device_memory
        self.limit, self.option, self.budget, self.needs = limit, option, budget, needs
        self.is_reentrant = is_reentrant  # whether layers recompute as reentrant checkpoints do
        self.asked = [option, limit]  # a failed allocation may lower the limit
        self.has_shrunk = False  # whether a failed allocation has lowered the limit, or the budget
        self.is_sharded = is_sharded(accelerator)
        self.why_whole = why_not_in_slices(flat_model.model, flat_model.route, flat_model.group)
        self.current: Pass | None = None  # the pass under way, from its decision on
        # Of passes since the last log
        self.micro_batches = self.slices = self.predicted = 0
        self.layers_recomputed = 0.0
        # Measured peaks: how many, and the largest ratio of a measured to a predicted one
        self.observed, self.most_measured = 0, 0.0

    # --- decisions --------------------------------------------------------------------------------------------------

    def decide(self, batch: FlatBatch) -> Decision:
        """How a pass that begins computes a batch. Those of one batch are computed alike, with gradients or without."""
        decision = self.own_decision(batch)
        # In each pass, as processes compute different parts at the same time; one with fewer repeats its last
        if self.is_sharded:
            decision = self._agreed(batch, decision)
        if torch.is_grad_enabled():
            if self.why_whole:
                self.refuse_oversized(batch.counts.computed)
            if decision.peak > self.budget and not self.has_shrunk:
                raise self.too_small_for(batch)
            self.current = Pass(batch, decision, self.device_memory.begin() if self.corrects else 0)
        return decision

    def own_decision(self, batch: FlatBatch) -> Decision:
        """What this process decides by itself: the whole with as few layers recomputed as fit, or else slices."""
        # Kept with the layout, from whose lengths it follows
        return batch.layout.derived(("decision", self.budget, self.limit), partial(self._decided, batch))

    def _decided(self, batch: FlatBatch) -> Decision:
        segments, tokens = batch.layout.segments, batch.counts.computed
        number, peak = None, 0
        whole = None if self.needs is None else self.load(batch)
        if self.needs is not None and whole is not None:
            number, peak = self.needs.fewest_recomputed(whole, self.budget)
        if self.why_whole or self._holds(tokens, peak):
            return Decision((), number, peak)  # which is refused, if it trains and does not fit
        tried = list[Decision]()
        low = high = min(self.limit or tokens, tokens)
        for low in sizes_to_try(segments, high, LEAST_SLICE):
            tried.append(self._cut(batch, whole, low))
            if tried[-1].peak <= self.budget:
                break
            high = low
        best = min(tried, key=lambda decision: decision.peak)
        # The largest slices that fit, to within an eighth: they keep devices busier, and recompute no more
        while high - low > max(1, low // 8) and best.peak <= self.budget:
            middle = (low + high) // 2
            if (larger := self._cut(batch, whole, middle)).peak <= self.budget:
                best, low = larger, middle
            else:
                high = middle
        return best

    def _agreed(self, batch: FlatBatch, own: Decision) -> Decision:
        """The decision for all processes, as they gather weights together: the most slices and recomputed layers."""
        counts = torch.tensor([[own.num_slices, own.num_recomputed or 0]], device=self.accelerator.device)
        # Not `accelerator.gather`, which does nothing while `PartMetrics` collects the metrics of a part
        number, layers = map(int, gather(counts).amax(0).tolist())
        if number == own.num_slices and (number > 1 or self.needs is None):
            return own
        if number == 1:
            assert self.needs is not None
            return Decision((), layers, int(self.needs.peaks(self.load(batch))[layers]))
        whole = None if self.needs is None else self.load(batch)
        return self._in_slices(batch, whole, cut_by_number(batch.counts.computed, number, batch.layout.host_blocks))

    def _holds(self, tokens: int, peak: int) -> bool:
        """Whether so many tokens, with such a peak, are within the limit and the budget."""
        return (self.limit is None or tokens <= self.limit) and peak <= self.budget

    def _cut(self, batch: FlatBatch, whole: np.ndarray | None, size: int) -> Decision:
        """The decision for slices of at most `size` tokens, given the load of the `whole` batch if there are needs."""
        return self._in_slices(batch, whole, cut_by_size(batch.layout.segments, size, batch.layout.host_blocks))

    def _in_slices(self, batch: FlatBatch, whole: np.ndarray | None, cuts: tuple[int, ...]) -> Decision:
        """The decision for slices: no layer recomputes by itself, neither within them nor in the vision tower."""
        segments = batch.layout.segments
        # Not in chunks if weights are sharded: each call of the head gathers its own
        at_once = None if self.is_sharded else int(np.diff(cuts).max())
        if self.needs is None or whole is None:
            return Decision(cuts, scored_at_once=at_once)
        scored = whole[SCORED] if at_once is None else min(whole[SCORED], at_once)
        features = slice_features(segments, cuts, self.flat_model.route)
        return Decision(
            cuts, 0, self.needs.peak_of_slices(features, num_kept(segments, cuts), whole, int(scored)), at_once
        )

    def load(self, batch: FlatBatch) -> np.ndarray:
        """The [`load`] of a batch: the sizes by which its memory is predicted."""
        group = self.flat_model.group
        # In a group, the load of the process with the most scored tokens: all processes must decide alike
        scored = None if group is None else max(scored_sizes(batch, group.size))
        return memory_features(batch, self.flat_model.route, scored)

    def parts(self, loads: Sequence[np.ndarray]) -> list[list[int]]:
        """
        The examples of each part of a micro-batch whose losses add up, by the [`load`] of each: as few parts as
        first-fit finds. One that does not fit by itself has a part of its own, which is computed in slices.
        """
        parts: list[list[int]] = []
        sums: list[np.ndarray] = []
        for item in sorted(range(len(loads)), key=lambda i: -loads[i][TOKENS]):
            for i, total in enumerate(sums):
                joined = joined_features(total, loads[item], self.flat_model.route)
                peak = 0 if self.needs is None else int(self.needs.peaks(joined).min())
                if self._holds(joined[TOKENS], peak):
                    parts[i].append(item)
                    sums[i] = joined
                    break
            else:
                parts.append([item])
                sums.append(loads[item])
        return [sorted(part) for part in parts]

    def is_whole(self, batch: FlatBatch) -> bool:
        """Whether a batch is computed whole, and fits."""
        decision = self.own_decision(batch)
        return not decision.cuts and self._holds(batch.counts.computed, decision.peak)

    # --- what no budget can hold ------------------------------------------------------------------------------------

    def least_bytes(self, batch: FlatBatch) -> int:
        """The least bytes in which a batch can be computed."""
        assert self.needs is not None
        whole, segments, tokens = self.load(batch), batch.layout.segments, batch.counts.computed
        peaks = list[int]()
        if self.why_whole or self.limit is None or tokens <= self.limit:
            peaks.append(int(self.needs.peaks(whole).min()))
        if not self.why_whole:
            sizes = sizes_to_try(segments, min(self.limit or tokens, tokens), LEAST_SLICE)
            peaks += [self._cut(batch, whole, size).peak for size in sizes]
        return min(peaks)

    def too_small_for(self, batch: FlatBatch, name: str = "a micro-batch", lower: str = "`max_length`") -> ValueError:
        """The error of a batch that does not fit; `lower` names what makes it smaller."""
        assert self.needs is not None
        least = math.ceil(self.least_bytes(batch) / GIB * 1000) / 1000
        how = f"with all activations recomputed, as {self.why_whole}" if self.why_whole else "in slices"
        return ValueError(
            f"`memory_budget={self.option}` ({self.budget / GIB:.3f} GiB) is less than {name} needs: {least:.3f} GiB "
            f"for {batch.counts.computed} tokens {how}, of which {self.needs.fixed / GIB:.3f} GiB are weights, "
            f"gradients, the optimizer and what others hold. Raise it to at least {least:.3f}, or lower {lower}."
        )

    def refuse_oversized(self, tokens: int, name: str = "a micro-batch") -> None:
        """Refuse more tokens than the limit, of a model that cannot compute slices, as `why_whole` says."""
        if self.limit is not None and tokens > self.limit:
            raise ValueError(
                f"`max_tokens_per_micro_batch={self.limit}` is less than {name} needs ({tokens} tokens), and it cannot "
                f"be computed in slices: {self.why_whole}. Raise it, or lower `per_device_train_batch_size` or "
                "`max_length`."
            )

    # --- account ----------------------------------------------------------------------------------------------------

    @property
    def corrects(self) -> bool:
        """Whether peaks that are measured correct the prediction, as those of the first micro-batches do."""
        return self.needs is not None and self.device_memory.can_reset and self.observed < CORRECTED

    def finish(self, has_stepped: bool) -> None:
        """A pass ended well; `has_stepped` says whether the optimizer has its state by now."""
        if (current := self.current) is None:  # nothing that trains was computed
            return
        tokens, decision = current.batch.counts.computed, current.decision
        self.micro_batches += 1
        self.slices += decision.num_slices
        again = decision.cuts[-2] / tokens if decision.cuts else 0.0  # all slices but the last are computed again
        self.layers_recomputed += (decision.num_recomputed or 0) + again * len(self.flat_model.recomputable)
        self.predicted = max(self.predicted, decision.peak)
        # Without gradients and moments, the peak would look as if activations needed next to nothing
        if has_stepped and self.corrects:
            self._correct(current)

    def _correct(self, current: Pass) -> None:
        """Correct the prediction by the peak of a pass; downwards only once `CORRECTED` peaks are known."""
        needs, group = self.needs, self.flat_model.group
        assert needs is not None
        self.observed += 1
        uncorrected = (current.decision.peak - needs.fixed) / needs.correction
        # Other tensors may have been allocated since the plan was made
        held, peak = current.held, self.device_memory.peak
        if group is not None:
            held, peak = group.largest([held, peak]).tolist()
        self.needs = needs = replace(needs, fixed=max(needs.fixed, held))
        self.most_measured = max(self.most_measured, (peak - needs.fixed) / uncorrected)
        if self.most_measured > needs.correction or self.observed == CORRECTED:
            self.needs = replace(needs, correction=max(self.most_measured, 0.1))

    def figures(self) -> dict[str, float]:
        """Figures since the last call: over all processes the mean of slices and layers, and the highest prediction."""
        counts = [self.micro_batches, self.slices, self.layers_recomputed]
        gathered = of_all_processes([*counts, self.predicted / GIB, self.budget / GIB], self.accelerator)
        self.micro_batches = self.slices = self.predicted = 0
        self.layers_recomputed = 0.0
        number, slices, recomputed = gathered[:, :3].sum(0).tolist()
        if not number:
            return {}
        figures = {"flat/slices": slices / number}
        if self.needs is None:
            return figures
        return figures | {
            "flat/recomputed": recomputed / number / len(self.flat_model.recomputable),
            "flat/predicted_memory_gib": gathered[:, 3].max().item(),
            "flat/memory_budget_gib": gathered[:, 4].min().item(),
        }

    def save(self, folder: str, rank: int) -> None:
        """Save what later decisions of the process `rank` depend on."""
        state = {"asked": self.asked, **{name: vars(self)[name] for name in _SAVED}}
        if self.needs is not None:
            state |= {"correction": self.needs.correction, "fixed": self.needs.fixed}
        (Path(folder) / STATE.format(rank=rank)).write_text(json.dumps(state) + "\n")

    def restore(self, folder: str, rank: int) -> None:
        """Restore what was saved, unless other budgets are asked for now, or the process is new or in a group."""
        path = Path(folder) / STATE.format(rank=rank)
        if self.flat_model.group is not None or not path.exists():
            return
        state = json.loads(path.read_text())
        if state.get("asked") != self.asked:  # releases before 0.5 did not save it
            return
        vars(self).update({name: state[name] for name in _SAVED})
        if self.needs is not None:
            fixed = max(self.needs.fixed, state["fixed"])
            self.needs = replace(self.needs, correction=state["correction"], fixed=fixed)
