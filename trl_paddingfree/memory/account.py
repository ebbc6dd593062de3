"""What a plan keeps account of: the passes that it has decided on, their peaks of memory, and what is saved of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.modeling_layers import GradientCheckpointingLayer

from ..flat.batch import FlatBatch
from ..flat.counts import of_all_processes
from ..model.flat_model import Decision
from ..model.sequence import SequenceGroup
from .device import GIB, PeakMemory
from .needs import MemoryNeeds

# Micro-batches whose peaks correct the prediction
CORRECTED = 8
# Each process measures its own peaks
STATE = "memory_budget_{rank}.json"


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass under a plan."""

    batch: FlatBatch
    decision: Decision
    held: int  # bytes before it


class Account:
    """
    The account of a plan under a `limit` of tokens, or under a `budget` of bytes that the `option` stands for, in which
    micro-batches have `needs` and `layers` can recompute. Processes of a `group` compute a batch together.
    """

    def __init__(
        self,
        device_memory: PeakMemory,
        group: SequenceGroup | None,
        limit: int | None,
        option: float | str | None,
        budget: int,
        needs: MemoryNeeds | None,
        layers: Sequence[GradientCheckpointingLayer],
    ):
        self.device_memory, self.group, self.layers = device_memory, group, layers
        self.limit, self.option, self.budget, self.needs = limit, option, budget, needs
        self.asked_limit = limit  # a failed allocation lowers the other
        self.has_shrunk = False
        self.current: Pass | None = None  # the pass that is being made, from its decision on
        self.micro_batches = self.slices = self.predicted = 0
        self.layers_recomputed = 0.0
        self.observed, self.most_measured = 0, 0.0

    @property
    def corrects(self) -> bool:
        """Whether peaks that are measured correct the prediction, as those of the first micro-batches do."""
        return self.needs is not None and self.device_memory.can_reset and self.observed < CORRECTED

    def finish(self, has_stepped: bool) -> None:
        """A pass ended well; `has_stepped` says whether the optimizer has its state by now."""
        if (made := self.current) is None:  # nothing that trains was computed
            return
        tokens, decision = made.batch.counts.computed, made.decision
        self.micro_batches += 1
        self.slices += decision.num_slices
        again = decision.cuts[-2] / tokens if decision.cuts else 0.0  # all slices but the last are computed again
        self.layers_recomputed += (decision.num_recomputed or 0) + again * len(self.layers)
        self.predicted = max(self.predicted, decision.expected)
        # Without gradients and moments, the peak would look as if activations needed next to nothing
        if has_stepped and self.corrects:
            self._correct(made)

    def _correct(self, made: Pass) -> None:
        """Correct the prediction by a peak; downwards only once enough of them are known."""
        needs = self.needs
        assert needs is not None
        self.observed += 1
        uncorrected = (made.decision.expected - needs.fixed) / needs.correction
        # What holds memory beside the models may have come since the plan was made
        held, peak = made.held, self.device_memory.current
        if self.group is not None:
            held, peak = self.group.largest([held, peak]).tolist()
        self.needs = needs = replace(needs, fixed=max(needs.fixed, held))
        self.most_measured = max(self.most_measured, (peak - needs.fixed) / uncorrected)
        if self.most_measured > needs.correction or self.observed == CORRECTED:
            self.needs = replace(needs, correction=max(self.most_measured, 0.1))

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        """Figures since the last call: over all processes the mean of slices and layers, and the highest prediction."""
        counts = [self.micro_batches, self.slices, self.layers_recomputed]
        gathered = of_all_processes([*counts, self.predicted / GIB, self.budget / GIB], accelerator)
        self.micro_batches = self.slices = self.predicted = 0
        self.layers_recomputed = 0.0
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

    def save(self, folder: str, rank: int) -> None:
        """Save what later decisions of the process `rank` follow from."""
        state: dict[str, Any] = {"option": self.option, "asked_limit": self.asked_limit, "limit": self.limit}
        state["has_shrunk"] = self.has_shrunk
        if self.needs is not None:
            state |= {"budget": self.budget, "correction": self.needs.correction, "fixed": self.needs.fixed}
            state |= {"observed": self.observed, "most_measured": self.most_measured}
        (Path(folder) / STATE.format(rank=rank)).write_text(json.dumps(state) + "\n")

    def restore(self, folder: str, rank: int) -> None:
        """Go on with what was saved, unless another budget was asked for since, or the process is new or in a group."""
        path = Path(folder) / STATE.format(rank=rank)
        if self.group is not None or not path.exists():
            return
        state = json.loads(path.read_text())
        if state["option"] != self.option:
            return
        if "asked_limit" in state and state["asked_limit"] == self.asked_limit:  # not known to 0.4.0
            self.limit = state["limit"]
        if self.needs is None:
            return
        self.has_shrunk = state["has_shrunk"]
        self.budget, self.observed, self.most_measured = state["budget"], state["observed"], state["most_measured"]
        fixed = max(self.needs.fixed, state.get("fixed", 0))  # not known to 0.2.0
        self.needs = replace(self.needs, correction=state["correction"], fixed=fixed)
