"""Other processes that compute the same batches as this one, as the core, the check and budgets ask them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch
from ..flat.segments import something_to_compute


class Peers(Protocol):
    """
    The processes that compute the batches of a model together, this one among them: by default, [`Alone`], else a
    [`~trl_paddingfree.groups.sequence.SequenceGroup`].
    """

    name: str  # the option that brings them, as messages name it; empty if there are none

    def spans(self, batch: FlatBatch) -> list[tuple[range, int]]:
        """Of each slice of a `batch`: the tokens of this process, by place, and how many count. Slices ask."""

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], batch: FlatBatch
    ) -> Sequence[torch.Tensor | None]:
        """
        The gradients of `tensors` as training would have them, from those of this process: the embedded tokens of a
        `batch`, `(1, t, D)`, and weights. The check asks.
        """

    def failed(self, model: PreTrainedModel, error: Exception) -> None:
        """Called if a pass of the check has failed with an `error`: raises one that ends the run if others wait."""

    def shares(self, batch: FlatBatch) -> tuple[Sequence[int], int]:
        """How many scored tokens of a `batch` each process has, and which of them is this one. Budgets ask."""

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """The element-wise maximum of `values` over all processes, which have to decide alike. Budgets ask."""


class Alone:
    """No other process: this one computes whole batches."""

    name = ""

    def spans(self, batch: FlatBatch) -> list[tuple[range, int]]:
        cuts = batch.schedule.cuts
        return [(something_to_compute(start, stop, cuts[-1]), stop - start) for start, stop in pairwise(cuts)]

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], batch: FlatBatch
    ) -> Sequence[torch.Tensor | None]:
        return gradients

    def failed(self, model: PreTrainedModel, error: Exception) -> None:
        pass

    def shares(self, batch: FlatBatch) -> tuple[Sequence[int], int]:
        return [len(batch.scored)], 0

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        return np.asarray(values)
