"""The second pass of the start-up check, under the conditions of training: training mode, gradients, a long flat row.

Four rows of equal length go through the model, in two pairs that share a long prefix. As a batch, they need no padding:
this is the reference. Of the flat batch, the losses of two rows are differentiated at a time, one row of each pair, not
side by side on the flat axis. The first row of a pair is scored at all tokens, the second after the shared prefix.
*Which* flat tokens carry gradient is compared without tolerance, in any precision: they must be those of the row alone.
More of them are a leak, fewer are forgotten context. How large the gradients are, within a tolerance, shows the rest:
context that only some layers forget, wrong positions.

For a model that does not train, log-probabilities of these rows are compared, and nothing is differentiated.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_allocation_failure, is_pooled
from ..model.restored import buffers_restored
from . import probe
from .training import (
    as_in_training,
    as_it_answers,
    frozen_layers_tried,
    refuse_broken_slices,
    small_parameters,
    watched_embeddings,
)

Gradients: TypeAlias = list[torch.Tensor | None]  # `None` where none arrives, or an engine keeps it

# Length of the rows: together more than 256 flat tokens
_LENGTH = 104
# The rows whose losses are differentiated together
_GROUPS = ((0, 2), (1, 3))
# Names in configurations for how far a token sees, where layers are built with that: nothing can narrow it afterwards
_BUILT_WITH = ("window_size", "sliding_window_size", "attention_window_size", "local_attention", "index_block_size",
               "index_topk_blocks", "indexer_budget", "block_size", "local_attention_window_len")  # fmt: skip
# Rows are made longer than limits up to so many tokens, and flat rows than the positions of a model: more takes long
_LONGEST_LIMIT = {"cpu": 256, "accelerator": 1024}
_LONGEST_FLAT = {"cpu": 2048, "accelerator": 8192}
# Gradients below this share of the largest count as zero: rounding alone may make them so
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 2
# The least relative tolerance of answers: rounding in float32 stays below it, forgotten and misplaced context do not
_LEAST_MISTAKE = 1e-5


@dataclass(frozen=True)
class GradientResult:
    """What the pass found on one route."""

    error: float = float("nan")  # largest difference from the rows alone, relative to them
    worst: str = ""  # what differs most: gradients of a row or of parameters, or answers of a model that does not train
    tolerance: float = float("nan")  # largest `error` that passes
    failure: str = ""  # what is wrong with which tokens carry gradient, or the error that the model raised
    skipped: str = ""  # why gradients were not compared
    notes: tuple[str, ...] = ()  # what else was not tried, and why
    lost: str = ""  # a frozen layer through which no gradient comes, with padding or without

    @property
    def passed(self) -> bool:
        """Whether the model may train this way, as far as was compared."""
        return not self.failure and (bool(self.skipped) or self.error <= self.tolerance)

    @property
    def reason(self) -> str:
        """What keeps the route from training, in words; empty if nothing does."""
        if self.passed or self.failure:
            return self.failure
        return f"{self.worst} are wrong by {self.error:.1e} of their size"

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What would have to be compared to call the model exact, and was not, each with the reason."""
        return (f"gradients were not compared, because {self.skipped}", *self.notes) if self.skipped else self.notes

    def __str__(self) -> str:
        if self.failure:
            return f"in training, {self.failure}"
        figures = [] if self.skipped else [f"{self.worst} {self.error:.1e}, allowed {self.tolerance:.1e}"]
        return "; ".join([*figures, *self.not_compared])


class RowsInTraining:
    """
    The reference for gradients: log-probabilities of four long rows in training mode, as a batch that needs no padding,
    and the gradients of their losses. With `trains=False`, only log-probabilities, in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel, call: probe.Call | None = None, draw: int = 0, trains: bool = True):
        self.model, self.call, self.trains = model, model if call is None else call, trains
        kind = "cpu" if model.device.type == "cpu" else "accelerator"
        config = model.config.get_text_config()
        positions = architecture.position_limits(model)
        found = {name: vars(config).get(name) for name in _BUILT_WITH}
        limits = {name: limit for name, limit in found.items() if isinstance(limit, int) and limit > 0}
        reached = [limit for limit in limits.values() if limit <= _LONGEST_LIMIT[kind]]
        length = min([max([_LENGTH, *(limit + limit // 4 for limit in reached)]), *positions])
        beyond = (f"`{name}={limit}`" for name, limit in limits.items() if limit >= length)
        self.notes = tuple(f"{each} is longer than the rows that were tried" for each in beyond)
        # Numbers of positions that a flat row can exceed within seconds
        self.position_limits = [limit for limit in positions if limit < _LONGEST_FLAT[kind]]
        self.rows = probe.long_rows(config.vocab_size, length, draw)
        self.unit = probe.rounding_unit(model)
        self.tolerance = probe.HALF_DIGITS_FACTOR * self.unit**0.5
        fork = int(length * probe.SHARED) - 1
        self.first_scored = (0, fork, 0, fork)  # of each row: the second and the fourth begin after the shared prefix
        with self.in_training(), frozen_layers_tried(model) as self.lost:  # names of those that pass no gradient on
            self.log_probs, (self.embedded, *self.small) = self.differentiate(probe.row_inputs(model, self.rows))

    def in_training(self) -> AbstractContextManager[None]:
        """The context in which the model is tried: as it trains, or as it answers if it does not."""
        return as_in_training(self.model, self.call) if self.trains else as_it_answers(self.model)

    def answers(self, inputs: Inputs) -> torch.Tensor:
        """`(R, L-1)` log-probabilities. A pooled head gives one answer per row, which is repeated to that shape."""
        output = self.call(**inputs)
        if not is_pooled(self.model):
            return output.log_probs
        return output.logits.sum(1, keepdim=True).expand(-1, inputs["input_ids"].size(1) - 1)

    def watched(self, inputs: Inputs) -> AbstractContextManager[list[torch.Tensor]]:
        """Within this context, the last entry of the list is what gradients of the tokens of `inputs` are taken at."""
        return watched_embeddings(self.model)

    def differentiate(
        self, inputs: Inputs, rows: tuple[int, ...] = (0, 1, 2, 3), places: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, Gradients]:
        """
        Log-probabilities, and the gradients of the losses of `rows`: first those at the embeddings, then those of small
        parameters. `places` are those of `rows` among the rows of `inputs`, if these are not all four.
        """
        if not self.trains:
            return self.answers(inputs).double().cpu(), [None]
        with self.watched(inputs) as embedded:
            log_probs = self.answers(inputs)
        if not embedded:
            raise RuntimeError("its input embeddings are not what it computes with")
        # Small gradients underflow in float16: training scales its losses, too
        scale = 2.0**8 if probe.compute_dtype(self.model) == torch.float16 else 1.0
        scored = zip(places or rows, rows, strict=True)
        loss = torch.stack([log_probs[place, self.first_scored[row] :].sum() for place, row in scored]).sum()
        watched = [embedded[-1], *small_parameters(self.model)]
        gradients = [*torch.autograd.grad(loss * scale, watched, allow_unused=True, retain_graph=True)]
        if (group := FlatModel.group_of(self.model)) is not None and "flat_batch" in inputs:
            gradients = [*group.whole_gradients(watched, gradients, inputs["flat_batch"])]
        return log_probs.detach().double().cpu(), [None if x is None else x.detach().double().cpu() for x in gradients]

    def tolerated(self, error: float) -> float:
        """The largest error that passes. Of gradients, rounding is measured only if `error` is above `tolerance`."""
        if not self.trains:
            with buffers_restored(self.model.modules()):  # "dynamic" frequencies follow the width
                width = len(self.rows[0]) + 5  # in another width, kernels round differently
                padded = self.answers(probe.row_inputs(self.model, self.rows, width)).double().cpu()
            noise = probe.relative_error(padded[:, : self.log_probs.size(1)], self.log_probs)
            # The difference may be zero by chance, where kernels sum up both widths alike
            return min(max(probe.NOISE_FACTOR * max(noise, self.unit), _LEAST_MISTAKE), self.tolerance)
        if error <= self.tolerance:
            return self.tolerance
        differences = [0.0]
        of_groups = []
        for rows in _GROUPS:  # what rounds differently if rows are computed two at a time
            inputs = probe.row_inputs(self.model, [self.rows[row] for row in rows])
            _, (embedded, *small) = self.differentiate(inputs, rows, places=(0, 1))
            if embedded is not None and self.embedded is not None:
                differences += [probe.relative_error(embedded[i], self.embedded[row]) for i, row in enumerate(rows)]
            of_groups.append(small)
        noise = float(np.max([*differences, *_errors_of_parameters(of_groups, self.small)]))
        return max(self.tolerance, min(probe.NOISE_FACTOR * noise, probe.MOST_NOISE))


def check_gradients(in_training: Callable[[], RowsInTraining], prefix_sharing: bool) -> GradientResult:
    """Compare the gradients of a flat batch, on the route that is installed, with those of the rows alone."""
    try:
        reference = in_training()
    except Exception as error:  # nor will it train with padding
        first_line, *_ = str(error).split("\n")
        raised = f"a row alone raises {type(error).__name__}: {first_line}"
        # If memory has run out, nothing is known of the model: that must not pass
        return GradientResult(failure=raised) if is_allocation_failure(error) else GradientResult(skipped=raised)
    if reference.lost:
        others = f" and {len(reference.lost) - 1} others" if len(reference.lost) > 1 else ""
        failure = f"no gradient comes through {reference.lost[0]}, which is frozen{others}"
        return GradientResult(failure=failure, lost=reference.lost[0])
    try:
        with reference.in_training():
            return _compare(reference, prefix_sharing)
    except Exception as error:  # whatever a model raises on flat input is a verdict, reported with its reason
        refuse_broken_slices(reference.model, error)
        return GradientResult(failure=f"{type(error).__name__}: {error}")


def _compare(reference: RowsInTraining, prefix_sharing: bool) -> GradientResult:
    inputs = probe.row_inputs(reference.model, reference.rows, prefix_sharing=prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"].to("cpu")  # where gradients are compared
    errors: dict[str, float] = {}
    notes = reference.notes
    is_random = False
    if not reference.trains:
        errors["answers on long rows"] = probe.relative_error(reference.differentiate(inputs)[0], reference.log_probs)
    else:
        answers, of_groups = [], []
        for rows in _GROUPS:
            log_probs, (flat, *small) = reference.differentiate(inputs, rows)
            if flat is None or reference.embedded is None or flat.shape[:2] != batch.input_ids.shape:
                return GradientResult(failure="no gradient reaches its input embeddings")
            if not reference.embedded.isfinite().all():
                return GradientResult(skipped="those of a row alone are not finite")
            if failure := _wrong_tokens(flat[0], reference.embedded, batch, rows):
                return GradientResult(failure=failure)
            for row in rows:
                of_row = flat[0][batch.row_index[row]]
                errors[f"gradients of row {row}"] = probe.relative_error(of_row, reference.embedded[row])
            answers.append(log_probs)
            of_groups.append(small)
        if of_parameters := _errors_of_parameters(of_groups, reference.small):
            errors["gradients of small parameters"] = float(np.max(of_parameters))  # Python's `max` may leave out `nan`
        elif reference.small:
            notes += ("gradients of parameters were not compared, because an engine keeps them to itself",)
        # Both passes computed the same batch: if their answers differ, the model draws at random, also in the gradients
        first, second = answers
        is_random = probe.root_mean_square(first - second) > reference.unit * probe.root_mean_square(first)
    if failure := _beyond_positions(reference, batch.counts.computed, is_random):
        return GradientResult(failure=failure)
    if is_random:
        reason = "it draws at random in training (no gradient reaches another row)"
        return GradientResult(skipped=reason, notes=notes)
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return GradientResult(errors[worst], worst, reference.tolerated(errors[worst]), notes=notes)


def _errors_of_parameters(of_groups: list[Gradients], expected: Gradients) -> list[float]:
    """How far gradients of parameters, added up over the two groups, are off, of parameters that have them."""
    parameters = zip(*of_groups, expected, strict=True)
    pairs = [(a + b, c) for a, b, c in parameters if a is not None and b is not None and c is not None]
    return probe.relative_errors([a for a, _ in pairs], [b for _, b in pairs])


def _wrong_tokens(flat: torch.Tensor, alone: torch.Tensor, batch: FlatBatch, rows: tuple[int, ...]) -> str:
    """What is wrong with which tokens carry gradient, `flat` `(T, D)` and `alone` `(R, L, D)`; empty if nothing is."""
    if not flat.isfinite().all():
        return "gradients are not finite"
    touched = (flat != 0).any(1)
    for row in rows:
        touched[batch.row_index[row]] = False
    for other in range(len(batch.row_index)):
        if other not in rows and touched[batch.row_index[other]].any():
            return f"row {other} gets gradient from row {' or '.join(map(str, rows))}"
    for row in rows:
        sizes, expected = flat[batch.row_index[row]].norm(dim=1), alone[row].norm(dim=1)
        has, wanted = sizes > _NEGLIGIBLE * sizes.max(), expected > _NEGLIGIBLE * expected.max()
        if lost := (wanted & (sizes == 0)).nonzero()[:, 0].tolist():
            where = f"its first {len(lost)} tokens" if lost[-1] == len(lost) - 1 else f"{len(lost)} of its tokens"
            return f"row {row} forgets {where}"
        if more := (has & (expected == 0)).nonzero()[:, 0].tolist():
            return f"row {row} gets gradient at its token {more[0]}, which it does not alone"
    return ""


def _beyond_positions(reference: RowsInTraining, computed: int, is_random: bool) -> str:
    """What is wrong with a flat row of more tokens than a row may have positions, in words; empty if nothing is."""
    for limit in reference.position_limits:
        if limit < computed:  # the flat row of the check has been longer
            continue
        copies = limit // sum(map(len, reference.rows)) + 1
        inputs = probe.row_inputs(reference.model, reference.rows * copies, prefix_sharing=False)
        try:
            with torch.no_grad():
                log_probs = reference.answers(inputs).double().cpu()
        except Exception as error:
            return str(error)  # names the length, and what to change
        wrong = probe.root_mean_square(log_probs - reference.log_probs.repeat(copies, 1))
        if not is_random and not wrong <= reference.tolerance * probe.root_mean_square(reference.log_probs):
            return f"a flat row of more than the {limit} positions of its configuration is wrong by {wrong:.1e} nats"
    return ""
