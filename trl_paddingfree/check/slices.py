"""Slices are proven once, cut small, as training runs them: against the same flat batch, computed whole.

Four long rows go through the model twice. Answers must agree as far as they do with those of padded rows, and gradients
of the last row up to rounding. *Which* tokens carry gradient must agree without any tolerance: a slice that reads keys
which are not on its paths reaches others, and one that misses some reaches fewer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..flat.slices import cut_by_size
from ..model import architecture
from ..model.flat_model import Decision, FlatModel
from ..model.forward import is_pooled
from ..model.restored import attributes_set
from .gradients import MOST_NOISE, off_by, relative
from .probe import HALF_DIGITS_FACTOR, NOISE_FACTOR, Call, long_rows, narrowed, rounding_unit, row_inputs
from .training import as_in_training, as_it_answers, small_parameters, watched_embeddings

# Tokens of a row, and of a slice: so many that cuts lie within prefixes and within what follows them
_LENGTH, _SIZE = 104, 45


@dataclass(frozen=True)
class SlicesResult:
    """What the check found: differences between slices and the whole, relative to the size of the whole."""

    num_slices: int
    error: float  # of answers
    tolerance: float  # the largest `error` that passes
    gradients: float  # the largest, of gradients at the embeddings and of small parameters; `nan` if there are none
    of_gradients: float  # the largest of these that passes
    skipped: str = ""  # why gradients were not compared
    has_same_tokens: bool = True  # whether the same tokens carry gradient

    @property
    def passed(self) -> bool:
        """Whether the model may compute slices."""
        trains = bool(self.skipped) or (self.has_same_tokens and self.gradients <= self.of_gradients)
        return self.error <= self.tolerance and trains

    def __str__(self) -> str:
        found = f"gradients {self.gradients:.1e}, allowed {self.of_gradients:.1e}"
        if not self.has_same_tokens:
            found = "gradients in other tokens than those of the whole"
        if self.skipped:
            found = f"gradients not compared: {self.skipped}"
        return f"{self.num_slices} slices; error {self.error:.1e}, allowed {self.tolerance:.1e}; {found}"


def check_slices(model: PreTrainedModel, call: Call | None = None, *, skipped: str = "", draw: int = 0) -> SlicesResult:
    """
    Compute a flat batch whole and in slices, with windows that are shorter than its rows. Leaves the model as it was.

    `call` is what to call in place of `model`, the same under a wrapper. `skipped` says why no gradients are compared:
    then nothing is differentiated. Each `draw` has other rows.
    """
    flat = FlatModel.of(model)
    assert flat is not None
    length = min([_LENGTH, *architecture.position_limits(model)])
    rows = long_rows(model.config.get_text_config().vocab_size, length, draw)
    inputs = row_inputs(model, rows, prefix_sharing=flat.route.prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"]
    cuts = cut_by_size(batch.layout.segments, min(_SIZE, length))
    unit = rounding_unit(model)
    half = HALF_DIGITS_FACTOR * unit**0.5
    of_gradients = min(half, MOST_NOISE)
    with narrowed(model), as_it_answers(model) if skipped else as_in_training(model, call):
        whole, sliced = (_answered(flat, inputs, each, call, not skipped) for each in (Decision(), Decision(cuts)))
        padded = _answered(flat, row_inputs(model, rows), Decision(), call, not skipped)
    errors, has_same_tokens = off_by(sliced.small, whole.small), True
    if whole.embedded is not None and sliced.embedded is not None:
        has_same_tokens = torch.equal(*((x != 0).any(-1) for x in (sliced.embedded, whole.embedded)))
        errors.append(relative(sliced.embedded, whole.embedded))
    largest = float(np.max(errors)) if errors else float("nan")  # Python's `max` may leave out what is `nan`
    if errors and not largest <= of_gradients:  # arithmetic that rounds more (4-bit weights, many layers of bfloat16)
        of_rows = float(np.max(off_by(padded.small, whole.small), initial=0.0))
        of_gradients = max(of_gradients, min(NOISE_FACTOR * of_rows, max(half, MOST_NOISE)))
    # A pooled head gives one number a row, so few that what they vary by is as often missed
    least = unit * (NOISE_FACTOR if flat.is_pooled else 1)
    noise = NOISE_FACTOR * max(relative(padded.answers, whole.answers), least)
    if vars(model).get("is_quantized"):  # kernels of few tokens, which slices have, round by more than those of many
        noise = half
    return SlicesResult(
        num_slices=len(cuts) - 1,
        error=relative(sliced.answers, whole.answers),
        tolerance=min(noise, half),
        gradients=largest,
        of_gradients=of_gradients,
        skipped=skipped or ("" if errors else "none were in sight"),
        has_same_tokens=has_same_tokens,
    )


class _Pass(NamedTuple):
    """What a pass of the model gives, float64, with the gradients of the last row's answers."""

    answers: torch.Tensor
    embedded: torch.Tensor | None  # at the embeddings of all tokens; `None` where processes have others
    small: list[torch.Tensor]  # of small parameters


def _answered(flat: FlatModel, inputs: Inputs, decision: Decision, call: Call | None, trains: bool) -> _Pass:
    model, spans = flat.model, np.diff(decision.cuts).tolist()
    # Rows stay rows, also where a trainer has calls of its own become flat, and count
    fixed = attributes_set([(flat, "decide", lambda _: decision), (flat, "flattener", None)])
    with fixed, watched_embeddings(model) as embedded:  # the backward pass computes slices again, hooked alike
        output = (model if call is None else call)(**inputs)
        answers = output.logits if is_pooled(model) else output.log_probs
        own = [] if flat.group is not None else embedded[: len(spans)] if len(embedded) > 1 else [*embedded]
        watched = [*own, *small_parameters(model)] if trains else []
        found = torch.autograd.grad(answers[-1].sum(), watched, allow_unused=True) if watched else ()
    of_all = [x.new_zeros(x.shape) if y is None else y for x, y in zip(watched, found, strict=True)]
    of_tokens, small = of_all[: len(own)], of_all[len(own) :]
    if flat.group is not None:  # each process has other tokens
        # FSDP2 keeps gradients of sharded parameters to itself
        small = [] if any(isinstance(x, DTensor) for x in small) else flat.group.summed(small)
    if len(of_tokens) > 1:  # without what stands for no token
        of_tokens = [x[:, :n] for x, n in zip(of_tokens, spans, strict=True)]
    at_embeddings = torch.cat(of_tokens, 1).double() if of_tokens else None
    return _Pass(answers.detach().double(), at_embeddings, [x.double() for x in small])
