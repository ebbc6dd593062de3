"""Looks at training calls outside of our trainers: `padding_free(model, check_steps=...)`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from ..core.check.prove import UnprovenModelError
from ..core.check.training import is_sharded
from ..core.flat.batch import FlatBatch, Inputs
from ..core.model.flat_model import FlatModel
from ..core.model.restored import attributes_set
from .certificate import Certificate, conclude
from .look import Rows, look

logger = logging.get_logger(__name__)

BY = "padding_free, `check_steps`"  # how the log names it
SHARDED = "its weights are sharded, and within a call, they cannot be gathered for single rows"


class LooksAtCalls:
    """
    Looks at the first training call of a model, and at one of every `every` calls, before it is computed.

    Each process looks at its own calls: an error ends it, and its launcher ends the others. What was found so far is in
    `found`.
    """

    def __init__(self, flat_model: FlatModel, every: int):
        self.flat_model, self.every = flat_model, every
        self.calls = 0  # with gradients, so far
        self.mistake = ""  # that a look has found, in words, whoever has caught its error
        self.found = Certificate()

    def __call__(
        self,
        forward: Callable[..., Any],
        flat_forward: Callable[[Callable[..., Any], Inputs, FlatBatch], Any],
        inputs: Inputs,
        batch: FlatBatch,
    ) -> None:
        """
        Look at a call of `forward` with these `inputs` by name. Its rows are those of `batch`, which `flat_forward`
        computes.
        """
        model, calls = self.flat_model.model, self.flat_model.padded
        if not (model.training and torch.is_grad_enabled()):
            return
        self._refuse_to_go_on()
        self.calls += 1
        if (self.calls - 1) % self.every:
            return
        if is_sharded(model):
            if SHARDED not in self.found.not_compared:
                self.found.not_compared.append(SHARDED)
                logger.warning(f"{BY}: no call is compared with its rows, because {SHARDED}.")
            return

        def call(flat_batch: FlatBatch | None = None, **given: Any) -> CausalLMOutput:
            if flat_batch is None:
                with calls.aside():
                    outputs = forward(**given)
            else:
                outputs = flat_forward(forward, given, flat_batch)
            names = outputs if isinstance(outputs, dict) else ()
            return CausalLMOutput(logits=outputs["logits"] if "logits" in names else outputs[0])

        rows = Rows(
            self.flat_model, call, _with_positions(forward, inputs, batch), batch, seed=self.calls - 1, pooled=False
        )
        with attributes_set([(calls, "looks", None), (calls, "of_head", None)]):
            looked = look(rows)
        _, messages = self.found.add(looked)
        self.mistake = conclude(
            self.flat_model,
            looked,
            messages,
            by=BY,
            of_what=f"training call {self.calls:,}",
            advice="Leave the call of `padding_free` out to train with padding. Nothing was learnt from this call.",
        )
        self._refuse_to_go_on()

    def _refuse_to_go_on(self) -> None:
        if self.mistake:
            raise UnprovenModelError(self.mistake)


def _with_positions(forward: Callable[..., Any], inputs: Inputs, batch: FlatBatch) -> Inputs:
    """The inputs of a call with one position per token where rows begin with padding, or all share their positions."""
    given = inputs.get("position_ids")
    if given is None and (batch.row_mask[:, 0].all() or "position_ids" not in inspect.signature(forward).parameters):
        return inputs
    return inputs | {"position_ids": torch.where(batch.row_mask, batch.position_ids[0][batch.row_index], 0)}
