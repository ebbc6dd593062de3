"""What capabilities add to a pass of a flat model: hooks, of which a plain pass has none.

A batch brings the hooks of what it is made of (its images, its slices), in [`FlatBatch.hooks`]; a model brings those of
how it is trained (the processes that share a batch, the layers that recompute), in [`FlatModel.hooks`]. Those of the
model begin a pass, as they may add to those of the batch, which come first in all that follows. Apart from them, a pass
meets a capability only in layers that carry states ([`~trl_paddingfree.core.model.mixers.Mixers`]), and in calls that
bring no flat batch (`FlatModel.flatten`, `FlatModel.padded`).
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from transformers.modeling_outputs import BaseModelOutput

from ..flat.batch import FlatBatch, Inputs, Make
from .restored import Change
from .told import PassContext

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

    from .flat_model import FlatModel

# What TRL's head answers for the `P` scored tokens of a batch, in fields of shape `(1, P)`; what the backbone returned
Answered = tuple["FusedCausalLMOutput", BaseModelOutput]
# Computes what TRL's head answers for a batch, or for a share of it
Compute = Callable[[FlatBatch], Answered]


class PassHook:
    """What a capability adds to a pass, in the order of a pass. Each method does nothing by default."""

    takes: tuple[str, ...] = ()  # arguments of a call that mean nothing to flat tokens without it, and are refused
    numbers: int = 0  # how many numbers it gives to modules beside the decoder, from which budgets predict memory

    def alone(self, row: int, inputs: Inputs, make: Make) -> tuple[Inputs, Make]:
        """
        What a call with one `row` of the batch takes, of the `inputs` of the call with all rows, in which what has one
        entry per token is that row's already; and what makes a flat batch of it, in place of `make`. Images: the row's
        own pixels. The proof on batches that train asks.
        """
        return inputs, make

    def begin(self, flat_model: "FlatModel", batch: FlatBatch) -> FlatBatch:
        """The `batch` as the model can compute it. Slices: whole, on a model that cannot cut it. Budgets: planned."""
        return batch

    def scored(self, flat_model: "FlatModel", batch: FlatBatch, compute: Compute) -> Answered:
        """
        What TRL's head answers for the scored tokens of a `batch`, from `compute`. Only the hooks of models are asked.
        Groups: each process computes its share, and all gather the answers.
        """
        return compute(batch)

    def inputs(self, flat_model: "FlatModel", batch: FlatBatch, inputs: Inputs) -> Inputs:
        """The arguments of the model's call, the flat tensors of the `batch` among them. Images: pixels, positions."""
        return inputs

    def context(self, context: PassContext) -> PassContext:
        """What the mask carries to the layers. Groups: exchanges around attention. Budgets: a count of its keys."""
        return context

    def changes(self, flat_model: "FlatModel", batch: FlatBatch) -> Iterable[Change]:
        """What is set while the backbone computes the `batch`. Images: the order of features. Slices: the decoder."""
        return ()

    def interrupted(self) -> None:
        """Something else was computed while a pass may be under way: a look. Budgets: the peak is not the pass's."""
