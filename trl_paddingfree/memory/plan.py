"""The plan of a run under budgets: how each pass is computed, what it needs, and what no budget can hold."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..flat.batch import FlatBatch
from ..flat.segments import Segments
from ..flat.slices import cut_by_number, cut_by_size, num_kept
from ..model.flat_model import Decision, FlatModel
from ..model.forward import is_allocation_failure
from ..model.routes import why_not_in_slices
from ..model.sequence import scored_sizes
from .account import Account, Pass
from .device import GIB, PeakMemory
from .engine import is_sharded
from .kept_bytes import LOADS, joined_load, load, slice_loads
from .needs import MemoryNeeds

logger = logging.get_logger(__name__)

# What is left of the budget after a failed allocation
AFTER_FAILURE = 0.9
# The least tokens of a slice under `memory_budget`: shorter ones keep no device busy
LEAST_SLICE = 128
# The least tokens that a slice is halved to, where it has failed to allocate
LEAST_HALVED = 8


def _sizes(segments: Segments, most: int) -> list[int]:
    """
    Sizes of slices to try, from `most` tokens down. Smaller ones may need more: where they cut completions, the keys of
    these stay; the one that a whole completion fits into cuts none.

    >>> _sizes(Segments((3000, 700, 800), (-1, 0, 0), (0, 3000, 3000)), 1000)
    [1000, 914, 500, 250, 128]
    """
    longest = max(length for i, length in enumerate(segments.lengths) if i not in segments.parents)
    sizes = {most >> halvings for halvings in range(most.bit_length())} | {longest * 8 // 7}
    least = min(LEAST_SLICE, most)
    return sorted({size for size in sizes if least < size <= most} | {least}, reverse=True)


class Plan(Account):
    """
    The plan of a run: decides how each pass computes a batch, under a `limit` of tokens, a `budget` in bytes, or both.
    The one owner of such decisions, which keeps account of what follows from them.

    Decisions follow from sizes that the host knows, and from what is saved with checkpoints, never from memory that
    happens to be free: a resumed run takes the same ones. `needs` are those of micro-batches and `layers` those that
    can recompute, under `memory_budget`, the `option`; without it, `needs` are `None`.
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
        layers: Sequence[GradientCheckpointingLayer] = (),
        is_reentrant: bool = False,
    ):
        super().__init__(device_memory, flat_model.group, limit, option, budget, needs, layers)
        self.accelerator, self.route = accelerator, flat_model.route
        self.is_reentrant = is_reentrant  # whether layers recompute as reentrant checkpoints do
        self.is_sharded = is_sharded(accelerator)
        self.why_whole = why_not_in_slices(flat_model.model, self.route, self.group)

    # --- decisions --------------------------------------------------------------------------------------------------

    def decide(self, batch: FlatBatch) -> Decision:
        """How a pass that begins computes a batch. Those of one batch are computed alike, with gradients or without."""
        decision = self.own_decision(batch)
        if self.is_sharded:  # in each pass: a process with fewer parts repeats one, beside others of others
            decision = self._agreed(batch, decision)
        if torch.is_grad_enabled():
            if self.limit is not None and batch.counts.computed > self.limit:
                self._refuse_whole(batch)
            if decision.expected > self.budget and not self.has_shrunk and self.needs is not None:
                raise self.too_small_for(batch)
            self.current = Pass(batch, decision, self.device_memory.begin() if self.corrects else 0)
        return decision

    def own_decision(self, batch: FlatBatch) -> Decision:
        """What this process decides by itself: the whole with as few layers recomputed as fit, or else slices."""
        return batch.layout.derived(("decision", self.budget, self.limit), lambda: self._own_decision(batch))

    def _own_decision(self, batch: FlatBatch) -> Decision:
        tokens, number, expected, sizes = batch.counts.computed, None, 0, np.zeros(0)
        if self.needs is not None:
            sizes = self.load(batch)
            number, expected = self.needs.fewest_recomputed(sizes, self.budget)
        is_few = self.limit is None or tokens <= self.limit
        if self.why_whole or (is_few and (expected <= self.budget or self.needs is None)):
            return Decision((), number, expected)  # which is refused, if it trains and does not fit
        most = high = self._most(tokens)
        cut = partial(self._cut, batch, sizes)
        best = cut(most)
        if self.needs is None or best.expected <= self.budget:
            return best
        for low in _sizes(batch.layout.segments, most):
            if (tried := cut(low)).expected < best.expected:
                best = tried
            if best.expected <= self.budget:
                break
            high = low
        while high - low > max(1, low // 8) and best.expected <= self.budget:
            middle = (low + high) // 2
            if (tried := cut(middle)).expected <= self.budget:
                best, low = tried, middle
            else:
                high = middle
        return best

    def _agreed(self, batch: FlatBatch, own: Decision) -> Decision:
        """What all processes do, which gather weights together: as many slices, and as many layers recomputed."""
        counts = torch.tensor([[own.num_slices, own.num_recomputed or 0]], device=self.accelerator.device)
        # Not by the accelerator, whose methods do nothing while a part of a micro-batch is computed
        number, layers = map(int, gather(counts).amax(0).tolist())
        if number == own.num_slices and (number > 1 or self.needs is None):
            return own
        sizes = np.zeros(0) if self.needs is None else self.load(batch)
        if number == 1:
            assert self.needs is not None
            return Decision((), layers, int(self.needs.peaks(sizes)[layers]))
        self._refuse_whole(batch)
        cuts = cut_by_number(batch.counts.computed, number, batch.layout.host_blocks)
        return self._in_slices(batch, cuts, sizes)

    def _most(self, tokens: int) -> int:
        """The most that a slice of so many tokens may have."""
        return tokens if self.limit is None else min(self.limit, tokens)

    def _cut(self, batch: FlatBatch, sizes: np.ndarray, size: int) -> Decision:
        """The decision for slices of this size, given the load of the batch."""
        return self._in_slices(batch, cut_by_size(batch.layout.segments, size, batch.layout.host_blocks), sizes)

    def _in_slices(self, batch: FlatBatch, cuts: tuple[int, ...], sizes: np.ndarray) -> Decision:
        """The decision for slices: within them no layer recomputes, nor does the tower of images before them."""
        # Weights of a head that is sharded are gathered at each of its calls
        scored = None if self.is_sharded else int(np.diff(cuts).max())
        number = None if self.needs is None else 0
        return Decision(cuts, number, self._peak_of_slices(batch, cuts, sizes), scored)

    def load(self, batch: FlatBatch) -> np.ndarray:
        """The load of a batch."""
        # On several processes, that of the one with the most scored tokens, which all of the group know
        scored = None if self.group is None else max(scored_sizes(batch, self.group.size))
        return load(batch, self.route, self.device_memory.device, scored)

    def _peak_of_slices(self, batch: FlatBatch, cuts: tuple[int, ...], whole: np.ndarray) -> int:
        if self.needs is None:
            return 0
        loads = slice_loads(batch.layout.segments, cuts, self.route, whole)
        scored = whole[-1] if self.is_sharded else min(whole[-1], int(np.diff(cuts).max()))
        return self.needs.peak_of_slices(loads, num_kept(batch.layout.segments, cuts), whole, int(scored))

    def _refuse_whole(self, batch: FlatBatch) -> None:
        """Refuse a batch above its budget of a model that cannot compute slices."""
        if self.why_whole:
            above = self.limit is not None and batch.counts.computed > self.limit
            budget = f"max_tokens_per_micro_batch={self.limit}" if above else f"memory_budget={self.option}"
            raise ValueError(
                f"`{budget}` is less than a micro-batch of {batch.counts.computed} tokens needs, and it cannot be "
                f"computed in slices: {self.why_whole}. Raise it, or lower `per_device_train_batch_size` or "
                "`max_length`."
            )

    def parts(self, loads: Sequence[np.ndarray]) -> list[list[int]]:
        """
        The examples of each part of a micro-batch whose losses add up, by the [`load`] of each: as few parts as
        first-fit finds. One that does not fit by itself has a part of its own, which is computed in slices.
        """
        tokens = [int(x[LOADS.index("tokens")]) for x in loads]
        parts: list[list[int]] = []
        sums: list[np.ndarray] = []
        for item in sorted(range(len(loads)), key=lambda i: -tokens[i]):
            joined = ((i, joined_load(total, loads[item], self.route)) for i, total in enumerate(sums))
            found = next(((i, total) for i, total in joined if self._fits(total)), None)
            if found is None:
                parts.append([item])
                sums.append(loads[item])
            else:
                parts[found[0]].append(item)
                sums[found[0]] = found[1]
        return [sorted(part) for part in parts]

    def _fits(self, sizes: np.ndarray) -> bool:
        in_memory = self.needs is None or int(self.needs.peaks(sizes).min()) <= self.budget
        return in_memory and (self.limit is None or sizes[LOADS.index("tokens")] <= self.limit)

    def is_whole(self, batch: FlatBatch) -> bool:
        """Whether a batch is computed whole, and fits."""
        decision, is_few = self.own_decision(batch), self.limit is None or batch.counts.computed <= self.limit
        return is_few and not decision.cuts and (self.needs is None or decision.expected <= self.budget)

    # --- what no budget can hold ------------------------------------------------------------------------------------

    def least(self, batch: FlatBatch) -> int:
        """The least bytes in which a batch can be computed."""
        assert self.needs is not None
        sizes, segments = self.load(batch), batch.layout.segments
        whole = int(self.needs.peaks(sizes).min())
        if self.why_whole:
            return whole
        most = self._most(segments.num_tokens)
        return min([whole, *(self._cut(batch, sizes, size).expected for size in _sizes(segments, most))])

    def too_small_for(self, batch: FlatBatch, name: str = "a micro-batch", lower: str = "`max_length`") -> ValueError:
        """The error of a batch that does not fit; `lower` names what makes it smaller."""
        assert self.needs is not None
        least = math.ceil(self.least(batch) / GIB * 1000) / 1000
        how = f"with all activations recomputed, as {self.why_whole}" if self.why_whole else "in slices"
        return ValueError(
            f"`memory_budget={self.option}` ({self.budget / GIB:.3f} GiB) is less than {name} needs: {least:.3f} GiB "
            f"for {batch.counts.computed} tokens {how}, of which {self.needs.fixed / GIB:.3f} GiB are weights, "
            f"gradients, the optimizer and what others hold. Raise it to at least {least:.3f}, or lower {lower}."
        )

    # --- failed allocations -----------------------------------------------------------------------------------------

    def shrink(self, error: RuntimeError) -> None:
        """Lower the budget if `error` says that memory ran out in a pass, and another decision follows. Else raise."""
        # Before the decision, there is no current pass: where a trainer generates its rows, with memory of its own
        if (failed := self.current) is None or not is_allocation_failure(error):
            raise error
        if advice := self._why_not_again():
            raise type(error)(f"{error}\n{advice}") from error
        before, limit = f"{failed.decision.num_slices} slices" if failed.decision.cuts else "one piece", self.limit
        if not self._lower(failed):
            raise error
        now = f"the memory budget is {self.budget / GIB:.3f} GiB"
        if self.limit != limit:
            now = f"micro-batches of more than {self.limit} tokens are computed in slices"
        logger.warning(
            f"An allocation failed in a micro-batch of {failed.batch.counts.computed} tokens, in {before}. It is "
            f"computed again, and from here on {now}."
        )

    def _lower(self, failed: Pass) -> bool:
        """Lower the budget until more layers recompute, or slices are smaller: not if nothing is left to halve."""
        decision, tokens = failed.decision, failed.batch.counts.computed
        if self.needs is not None and not decision.cuts:
            budget, before, held = min(self.budget, decision.expected), self.budget, self.needs.fixed
            while budget > held:
                self.budget = budget = int(held + AFTER_FAILURE * (budget - held))
                other = self._own_decision(failed.batch)
                if other.cuts or (other.num_recomputed or 0) > (decision.num_recomputed or 0):
                    self.has_shrunk = True
                    return True
            self.budget = before
        largest = int(max(np.diff(decision.cuts), default=tokens))
        if self.why_whole or largest < 2 * LEAST_HALVED:
            return False
        self.limit, limit = largest // 2, self.limit
        other = self._own_decision(failed.batch)
        if not other.cuts or int(np.diff(other.cuts).max()) >= largest:  # an image block is not cut
            self.limit = limit
            return False
        self.has_shrunk = True
        return True

    def _why_not_again(self) -> str:
        """Why a micro-batch cannot be computed again after a failed allocation; empty if it can."""
        what = "`memory_budget`" if self.needs else "`max_tokens_per_micro_batch`"
        accelerator = self.accelerator
        if accelerator.num_processes > 1 or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return (
                "One process cannot compute a micro-batch again while the others wait for its gradients. Lower "
                f"{what}, and resume from the last checkpoint."
            )
        trained = [id(p) for layer in self.layers for p in set(layer.parameters()) if p.requires_grad]
        if self.is_reentrant and len(trained) != len(set(trained)):
            return (
                "Layers that share weights add to the same gradients several times with `use_reentrant=True`, so that "
                f"a micro-batch cannot be computed again. Leave `use_reentrant` out, or lower {what}."
            )
        return ""
