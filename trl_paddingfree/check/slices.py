"""The start-up check of slices: a flat batch in small slices, against the same flat batch computed whole.

Four long rows go through the model both ways. Answers must agree as well as those of padded rows agree with the whole,
and gradients of the last row up to rounding. *Which* tokens carry gradient must agree without any tolerance: a slice
that reads keys which are not on its paths reaches more tokens, and one that misses some reaches fewer.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..flat.schedule import Schedule
from ..flat.slices import cut_by_size
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_pooled
from . import probe
from .training import as_in_training, as_it_answers, small_parameters, watched_embeddings

# Tokens of a row, and of a slice: with these, cuts lie within prefixes, and within what follows them
_LENGTH, _SIZE = 104, 45


@dataclass(frozen=True)
class SlicesResult:
    """What the check found: differences between slices and the whole, relative to the norms of the whole."""

    num_slices: int
    error: float  # of answers
    tolerance: float  # the largest `error` that passes
    gradients: float  # the largest, of gradients at the embeddings and of small parameters; `nan` if there are none
    gradient_tolerance: float  # the largest `gradients` that passes
    skipped: str = ""  # why gradients were not compared
    has_same_tokens: bool = True  # whether the same tokens carry gradient

    @property
    def passed(self) -> bool:
        """Whether the model may compute slices."""
        trains = bool(self.skipped) or (self.has_same_tokens and self.gradients <= self.gradient_tolerance)
        return self.error <= self.tolerance and trains

    def __str__(self) -> str:
        found = f"gradients {self.gradients:.1e}, allowed {self.gradient_tolerance:.1e}"
        if not self.has_same_tokens:
            found = "gradients in other tokens than those of the whole"
        if self.skipped:
            found = f"gradients not compared: {self.skipped}"
        return f"{self.num_slices} slices; error {self.error:.1e}, allowed {self.tolerance:.1e}; {found}"


def check_slices(
    model: PreTrainedModel, call: probe.Call | None = None, *, skipped: str = "", draw: int = 0
) -> SlicesResult:
    """
    Compute a flat batch whole and in slices, with windows that are shorter than its rows. Leaves the model as it was.

    `call` is what to call in place of `model`, the same under a wrapper. `skipped` says why no gradients are compared:
    then nothing is differentiated. Each `draw` has other rows.
    """
    flat = FlatModel.of(model)
    assert flat is not None
    length = min([_LENGTH, *architecture.position_limits(model)])
    rows = probe.long_rows(model.config.get_text_config().vocab_size, length, draw)
    inputs = probe.row_inputs(model, rows, prefix_sharing=flat.route.prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"]
    cuts = cut_by_size(batch.layout.segments, min(_SIZE, length))
    unit = probe.rounding_unit(model)
    half = probe.HALF_DIGITS_FACTOR * unit**0.5
    gradient_tolerance = min(half, probe.MOST_NOISE)
    with probe.narrowed(model), as_it_answers(model) if skipped else as_in_training(model, call):
        whole, sliced = (_passed(flat, inputs, each, call, not skipped) for each in (Schedule(), Schedule(cuts)))
        padded = _passed(flat, probe.row_inputs(model, rows), Schedule(), call, not skipped)
    errors = probe.relative_errors(sliced.small, whole.small)
    has_same_tokens = True
    if whole.embedded is not None and sliced.embedded is not None:
        has_same_tokens = torch.equal(*((x != 0).any(-1) for x in (sliced.embedded, whole.embedded)))
        errors.append(probe.relative_error(sliced.embedded, whole.embedded))
    largest = float(np.max(errors)) if errors else float("nan")  # Python's `max` may leave out what is `nan`
    if errors and not largest <= gradient_tolerance:
        # Padded rows show what rounds more than the dtype says: 4-bit weights, many layers of bfloat16
        noise = float(np.max(probe.relative_errors(padded.small, whole.small), initial=0.0))
        gradient_tolerance = max(gradient_tolerance, min(probe.NOISE_FACTOR * noise, max(half, probe.MOST_NOISE)))
    # A pooled head gives one number a row: of so few, the measured noise may be near zero by chance
    least = unit * (probe.NOISE_FACTOR if flat.is_pooled else 1)
    tolerance = min(probe.NOISE_FACTOR * max(probe.relative_error(padded.answers, whole.answers), least), half)
    if vars(model).get("is_quantized"):  # slices have few tokens, for which some have kernels that round more
        tolerance = half
    return SlicesResult(
        num_slices=len(cuts) - 1,
        error=probe.relative_error(sliced.answers, whole.answers),
        tolerance=tolerance,
        gradients=largest,
        gradient_tolerance=gradient_tolerance,
        skipped=skipped or ("" if errors else "none were in sight"),
        has_same_tokens=has_same_tokens,
    )


class _Pass(NamedTuple):
    """Answers of a pass of the model, and the gradients of the last row's, all float64."""

    answers: torch.Tensor
    embedded: torch.Tensor | None  # gradients at the embeddings; `None` where other processes have some of the tokens
    small: list[torch.Tensor]  # gradients of small parameters


def _passed(flat: FlatModel, inputs: Inputs, schedule: Schedule, call: probe.Call | None, trains: bool) -> _Pass:
    """Compute rows, or a flat batch by `schedule`."""
    model = flat.model
    if (batch := inputs.get("flat_batch")) is not None:
        inputs = {**inputs, "flat_batch": replace(batch, schedule=schedule)}
    with watched_embeddings(model) as embedded:
        output = (model if call is None else call)(**inputs)
        answers = output.logits if is_pooled(model) else output.log_probs
        # Before the backward pass, which computes slices again and adds their embeddings
        of_slices = embedded[: schedule.num_slices] if flat.group is None else []
        watched = [*of_slices, *small_parameters(model)] if trains else []
        gradients = torch.autograd.grad(answers[-1].sum(), watched, materialize_grads=True) if watched else ()
    at_embeddings, small = gradients[: len(of_slices)], [*gradients[len(of_slices) :]]
    if flat.group is not None:  # each process has other tokens
        # FSDP2 keeps gradients of sharded parameters to itself
        small = [] if any(isinstance(x, DTensor) for x in small) else flat.group.summed(small)
    if len(at_embeddings) > 1:  # without the token that a slice has for the longest position, if frequencies follow it
        sizes = np.diff(schedule.cuts).tolist()
        at_embeddings = tuple(x[:, :size] for x, size in zip(at_embeddings, sizes, strict=True))
    of_tokens = torch.cat(at_embeddings, 1).double() if at_embeddings else None
    return _Pass(answers.detach().double(), of_tokens, [x.double() for x in small])
