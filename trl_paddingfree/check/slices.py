"""The start-up check of slices: a flat batch in small slices, against the same flat batch computed whole.

Four long rows go through the model both ways. Answers must agree as well as those of padded rows agree with the whole,
and gradients of the last row up to rounding. *Which* tokens carry gradient must agree without any tolerance: a slice
that reads keys which are not on its paths reaches more tokens, and one that misses some reaches fewer.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
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
from .comparison import NOISE_FACTOR, Comparison, Values, Verdict, worst_of
from .prove import UnprovenModelError, draws_of
from .training import as_in_training, as_it_answers, compared_parameters, is_small, sketch, watched_embeddings

# Tokens of a row, and of a slice: with these, cuts lie within prefixes, and within what follows them
_LENGTH, _SIZE = 104, 45


class SlicesResult(NamedTuple):
    """What the check found: differences between slices and the whole."""

    num_slices: int
    answers: Verdict
    gradients: Verdict  # at the embeddings and of parameters

    @property
    def passed(self) -> bool:
        """Whether the model may compute slices."""
        return self.answers.passed and self.gradients.passed

    def __str__(self) -> str:
        error = f"error {self.answers.error:.1e}, allowed {self.answers.tolerance:.1e}"
        cut = f"{self.num_slices} slices" if self.num_slices > 1 else "whole"
        return f"{cut}; {error}; {self.gradients}"


def check_slices(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    skipped: str = "",
    draw: int = 0,
    is_compiled: bool = False,
) -> SlicesResult:
    """
    Compute a flat batch whole and in slices, with windows that are shorter than its rows. Leaves the model as it was.
    If it `is_compiled`, compute the whole by compiled code instead, beside eager code.

    `call` is what to call in place of `model`, the same under a wrapper. `skipped` says why no gradients are compared:
    then nothing is differentiated. Each `draw` has other rows.
    """
    flat = FlatModel.of(model)
    assert flat is not None
    length = min([_LENGTH, *architecture.position_limits(model)])
    rows = probe.long_rows(model, length, draw)
    inputs = probe.row_inputs(model, rows, prefix_sharing=flat.route.prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"]
    candidate = Schedule(() if is_compiled else cut_by_size(batch.layout.segments, min(_SIZE, length)))
    unit = probe.rounding_unit(model)
    # A pooled head gives one number a row: of so few, noise may be near zero by chance
    least = NOISE_FACTOR * unit * (NOISE_FACTOR if flat.is_pooled else 1)
    if vars(model).get("is_quantized"):  # slices have few tokens, for which some have kernels that round more
        least = math.inf
    trying = as_it_answers(model) if skipped else as_in_training(model, call)
    # Windows of other sizes would be compiled by themselves
    windows = nullcontext() if is_compiled else probe.narrowed(model)
    with windows, trying as left_out, torch.compiler.set_stance("force_eager"):
        passed = partial(_passed, flat, call=call, trains=not skipped)
        padded = cache(lambda: passed(probe.row_inputs(model, rows), Schedule()))
        whole = passed(inputs, Schedule())
        with torch.compiler.set_stance("default") if is_compiled else nullcontext():
            sliced = passed(inputs, candidate)
        comparisons = [
            Comparison.of_answers(whole.answers, sliced.answers, lambda: padded().answers, unit, least),
            Comparison.of_gradients(whole.at_tokens, sliced.at_tokens, lambda: padded().at_tokens, unit),
            Comparison.of_gradients(whole.parameters, sliced.parameters, lambda: padded().parameters, unit, True),
        ]
        answers, *gradients = [each.verdict() for each in comparisons]
    found = worst_of(gradients)
    if skipped or not (whole.at_tokens or whole.parameters):
        found = Verdict(skipped=skipped or "none were in sight")
    elif whole.touched is not None and not torch.equal(whole.touched, sliced.touched):  # type: ignore[arg-type]
        found = Verdict(failure="gradients in other tokens than those of the whole")
    return SlicesResult(candidate.num_slices, answers, replace(found, notes=left_out))


def prove_slices(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    skipped: str = "",
    is_compiled: bool = False,
    agree: Callable[[bool], bool] = bool,
) -> SlicesResult:
    """
    What [`check_slices`] finds, in the first of a few draws that passes on all processes, as `agree` says.

    Raises:
        [`UnprovenModelError`]: None does.
    """
    for draw in range(draws_of(model)):
        result = check_slices(model, call, skipped=skipped, draw=draw, is_compiled=is_compiled)
        if agree(result.passed):
            return result
    how, options = "slices of a flat batch differently from the whole", "`max_tokens_per_micro_batch`, `memory_budget`"
    if is_compiled:
        how, options = "flat batches by compiled code differently from eager ones", "`torch_compile`"
    raise UnprovenModelError(
        f"{type(model).__name__} computes {how} ({result}): training would be wrong. Leave {options} out."
    )


class _Pass(NamedTuple):
    """What a pass of the model gives: answers, and the gradients of the last row's."""

    answers: Values
    at_tokens: Values
    parameters: Values
    touched: torch.Tensor | None  # (1, T) which flat tokens carry gradient; `None` where other processes have some


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
        parameters = compared_parameters(model, is_small(model)) if trains else {}
        watched = [*of_slices, *parameters.values()] if trains else []
        gradients = torch.autograd.grad(answers[-1].sum(), watched, materialize_grads=True) if watched else ()
    at_tokens, of_parameters = gradients[: len(of_slices)], [*gradients[len(of_slices) :]]
    if flat.group is not None:  # each process has other tokens
        # FSDP2 keeps gradients of sharded parameters to itself
        is_kept = any(isinstance(x, DTensor) for x in of_parameters)
        of_parameters = [] if is_kept else flat.group.summed(of_parameters)
    named = zip(parameters, of_parameters, strict=False)
    found = {f"gradients of `{name}`": sketch(x) for name, x in named}
    answers = {"answers": answers.detach().double()}
    if not at_tokens:
        return _Pass(answers, {}, found, None)
    if len(at_tokens) > 1:  # without the token that a slice has for the longest position, if frequencies follow it
        at_tokens = tuple(x[:, :n] for x, n in zip(at_tokens, np.diff(schedule.cuts).tolist(), strict=True))
    tokens = torch.cat(at_tokens, 1).double()
    of_row = tokens[-1] if batch is None else tokens[0, batch.row_index[-1]]
    return _Pass(answers, {"gradients of the last row": of_row}, found, (tokens != 0).any(-1))
