"""The check's second pass, as training will be: training mode, gradients, a long flat row.

Four rows of equal length go through the model, in two pairs that share a long prefix. One batch of them, which needs no
padding, is the reference. Flat, the losses of two rows that share nothing and do not lie side by side are
differentiated at a time: of rows that hold a prefix, all losses; of the others, losses of what follows the prefix.
*Which* flat tokens carry gradient is a test without tolerance, in any precision: exactly those that do for the row
alone. More of them are a leak, fewer are forgotten context. The numbers find the rest: context that some layers forget,
wrong positions.

Of a model that does not train, the answers on these rows are compared, and nothing is differentiated.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch, Inputs
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_allocation_failure, is_pooled
from ..model.restored import buffers_restored
from .probe import (
    HALF_DIGITS_FACTOR,
    NOISE_FACTOR,
    SHARED,
    Call,
    compute_dtype,
    long_rows,
    root_mean_square,
    rounding_unit,
    row_inputs,
)
from .training import (
    as_in_training,
    as_it_answers,
    frozen_layers_tried,
    refuse_broken_slices,
    small_parameters,
    watched_embeddings,
)

# Length of the rows: together more than 256 flat tokens
_LENGTH = 104
# Rows of which losses are differentiated at a time
_GROUPS = ((0, 2), (1, 3))
# What limits how far a token sees and cannot be narrowed, because layers are built with it
_BUILT_WITH = ("window_size", "sliding_window_size", "attention_window_size", "local_attention", "index_block_size",
               "index_topk_blocks", "indexer_budget", "block_size", "local_attention_window_len")  # fmt: skip
# Limits of a row, and of a flat row, that are worth the time at start-up that it takes to pass them
_LONGEST_LIMIT = {"cpu": 256, "accelerator": 1024}
_LONGEST_FLAT = {"cpu": 2048, "accelerator": 8192}
# Gradients of less than this share of the largest are as good as none: rounding alone may make them zero
_NEGLIGIBLE = torch.finfo(torch.float32).eps ** 2
# Arithmetic that rounds more than its dtype says (4-bit weights) is measured, where it matters; however large that
# noise, mistakes move gradients by more than this
MOST_NOISE = 0.1
# Forgotten or misplaced context moves answers by more than this share of them, and rounding in float32 by less
_LEAST_MISTAKE = 1e-5
# Some parameters get next to no gradient, but for rounding: what counts then is the largest of them
LEAST_PARAMETER = 0.1


@dataclass(frozen=True)
class GradientResult:
    """What the pass found on one route."""

    error: float = float("nan")  # largest difference from the rows alone, relative to them
    worst: str = ""  # what differs most: gradients of a row or of parameters, or answers of a model that does not train
    tolerance: float = float("nan")  # largest `error` that passes
    failure: str = ""  # what is wrong with which tokens carry gradient, or the error that the model raised
    skipped: str = ""  # why gradients were not compared
    notes: tuple[str, ...] = ()  # what else was not tried, and why
    lost: str = ""  # the frozen layer that passes no gradient on, with padding either

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
        return (*([f"gradients were not compared, because {self.skipped}"] if self.skipped else []), *self.notes)

    def __str__(self) -> str:
        if self.failure:
            return f"in training, {self.failure}"
        figures = [] if self.skipped else [f"{self.worst} {self.error:.1e}, allowed {self.tolerance:.1e}"]
        return "; ".join([*figures, *self.not_compared])


class RowsInTraining:
    """
    The reference for gradients: what a model says of four long rows in training mode, in a batch that needs no padding,
    and the gradients of their losses. If it does not train (`trains=False`), what it says in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel, call: Call | None = None, draw: int = 0, trains: bool = True):
        self.model, self.call, self.trains = model, model if call is None else call, trains
        kind = "cpu" if model.device.type == "cpu" else "accelerator"
        config, positions = vars(model.config.get_text_config()), architecture.position_limits(model)
        limits = {name: config[name] for name in _BUILT_WITH if isinstance(config.get(name), int) and config[name] > 0}
        reached = [limit for limit in limits.values() if limit <= _LONGEST_LIMIT[kind]]
        length = min([max([_LENGTH, *(limit + limit // 4 for limit in reached)]), *positions])
        beyond = (f"`{name}={limit}`" for name, limit in limits.items() if limit >= length)
        self.notes = tuple(f"{each} is longer than the rows that were tried" for each in beyond)
        # Limits of positions that a flat row can pass within seconds
        self.beyond = [limit for limit in positions if limit < _LONGEST_FLAT[kind]]
        self.rows = long_rows(model.config.get_text_config().vocab_size, length, draw)
        self.unit = rounding_unit(model)
        self.tolerance = HALF_DIGITS_FACTOR * self.unit**0.5
        fork = int(length * SHARED) - 1
        self.first_scored = (0, fork, 0, fork)  # the second and the fourth row own what follows the shared prefix
        with self.in_training(), frozen_layers_tried(model) as self.lost:  # those that pass no gradient on
            self.log_probs, (self.embedded, *self.small) = self.differentiate(row_inputs(model, self.rows))

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
        """The context in which the last entry is where gradients of the tokens of `inputs` arrive."""
        return watched_embeddings(self.model)

    def differentiate(
        self, inputs: Inputs, rows: tuple[int, ...] = (0, 1, 2, 3), of: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """
        Log-probabilities, and gradients of the losses of `rows` at the embeddings and of small parameters.

        Where `inputs` hold some of the rows only, `of` says at which place each of `rows` is.
        """
        if not self.trains:
            return self.answers(inputs).double().cpu(), [None]
        with self.watched(inputs) as embedded:
            log_probs = self.answers(inputs)
        if not embedded:
            raise RuntimeError("its input embeddings are not what it computes with")
        # float16 has next to no small numbers: training scales its losses, too
        scale = 2.0**8 if compute_dtype(self.model) == torch.float16 else 1.0
        places = zip(of or rows, rows, strict=True)
        loss = torch.stack([log_probs[place, self.first_scored[row] :].sum() for place, row in places]).sum()
        watched = [embedded[-1], *small_parameters(self.model)]
        found = [*torch.autograd.grad(loss * scale, watched, allow_unused=True, retain_graph=True)]
        if (group := FlatModel.group_of(self.model)) is not None and "flat_batch" in inputs:
            found = [*group.whole_gradients(watched, found, inputs["flat_batch"])]
        return log_probs.detach().double().cpu(), [None if x is None else x.detach().double().cpu() for x in found]

    def tolerated(self, error: float) -> float:
        """The largest error that arithmetic explains, by padded rows, which are computed only if that is asked."""
        if not self.trains:
            with buffers_restored(self.model.modules()):  # "dynamic" frequencies follow the width
                width = len(self.rows[0]) + 5  # another width is another draw of the noise
                padded = self.answers(row_inputs(self.model, self.rows, width)).double().cpu()
            noise = relative(padded[:, : self.log_probs.size(1)], self.log_probs)
            # One draw may come out as nothing, where kernels sum up both widths alike
            return min(max(NOISE_FACTOR * max(noise, self.unit), _LEAST_MISTAKE), self.tolerance)
        if error <= self.tolerance:
            return self.tolerance
        moved, found_small = [0.0], []
        for rows in _GROUPS:  # how gradients move when the rows are computed two at a time
            inputs = row_inputs(self.model, [self.rows[row] for row in rows])
            _, (embedded, *found) = self.differentiate(inputs, rows, of=(0, 1))
            if embedded is not None and self.embedded is not None:
                moved += [relative(embedded[i], self.embedded[row]) for i, row in enumerate(rows)]
            found_small.append(found)
        noise = float(np.max([*moved, _of_parameters(found_small, self.small) or 0.0]))
        return max(self.tolerance, min(NOISE_FACTOR * noise, MOST_NOISE))


def check_gradients(in_training: Callable[[], RowsInTraining], prefix_sharing: bool) -> GradientResult:
    """Compare the gradients of a flat batch, on the route that is installed, with those of the rows alone."""
    try:
        reference = in_training()
    except Exception as error:  # nor will it train with padding
        first_line, *_ = str(error).split("\n")
        raised = f"a row alone raises {type(error).__name__}: {first_line}"
        # Memory that ran out says nothing of the model: that is not to pass
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
    inputs = row_inputs(reference.model, reference.rows, prefix_sharing=prefix_sharing)
    batch: FlatBatch = inputs["flat_batch"].to("cpu")  # where gradients are compared
    errors, notes, draws = dict[str, float](), list(reference.notes), False
    if not reference.trains:
        errors["answers on long rows"] = relative(reference.differentiate(inputs)[0], reference.log_probs)
    else:
        answers, small = [], []
        for rows in _GROUPS:
            log_probs, (flat, *found) = reference.differentiate(inputs, rows)
            if flat is None or reference.embedded is None or flat.shape[:2] != batch.input_ids.shape:
                return GradientResult(failure="no gradient reaches its input embeddings")
            if not reference.embedded.isfinite().all():
                return GradientResult(skipped="those of a row alone are not finite")
            if failure := _wrong_tokens(flat[0], reference.embedded, batch, rows):
                return GradientResult(failure=failure)
            for row in rows:
                errors[f"gradients of row {row}"] = relative(flat[0][batch.row_index[row]], reference.embedded[row])
            answers.append(log_probs)
            small.append(found)
        if (of_parameters := _of_parameters(small, reference.small)) is not None:
            errors["gradients of small parameters"] = of_parameters
        elif reference.small:
            notes.append("gradients of parameters were not compared, because an engine keeps them to itself")
        # The same rows twice: what draws at random in training has no numbers to compare
        draws = root_mean_square(answers[0] - answers[1]) > reference.unit * root_mean_square(answers[0])
    if failure := _beyond_positions(reference, batch.counts.computed, draws):
        return GradientResult(failure=failure)
    if draws:
        reason = "it draws at random in training (no gradient reaches another row)"
        return GradientResult(skipped=reason, notes=tuple(notes))
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    return GradientResult(errors[worst], worst, reference.tolerated(errors[worst]), notes=tuple(notes))


def _of_parameters(small: list[list[torch.Tensor | None]], expected: list[torch.Tensor | None]) -> float | None:
    """Largest difference of gradients of parameters, summed over the groups, relative to those expected, if any are."""
    found = zip(*small, expected, strict=True)
    pairs = [(a + b, c) for a, b, c in found if a is not None and b is not None and c is not None]
    errors = off_by([a for a, _ in pairs], [b for _, b in pairs])
    return float(np.max(errors)) if errors else None  # `nan` if any is: Python's `max` may leave it out


def off_by(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """How far gradients of parameters are off: where they are next to none, relative to a share of the largest."""
    least = LEAST_PARAMETER * max((float(x.norm()) for x in expected), default=0.0)
    return [float((a - b).norm()) / max(float(b.norm()), least, 1e-300) for a, b in zip(found, expected, strict=True)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far `a` is from `b`, relative to it."""
    return float((a - b).norm()) / max(float(b.norm()), 1e-300)


def _wrong_tokens(flat: torch.Tensor, alone: torch.Tensor, batch: FlatBatch, rows: tuple[int, ...]) -> str:
    """What is wrong with which of the `(T, D)` gradients of `rows` are zero, or an empty string."""
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
        lost = (wanted & (sizes == 0)).nonzero()[:, 0].tolist()
        if lost:
            where = f"its first {len(lost)} tokens" if lost[-1] == len(lost) - 1 else f"{len(lost)} of its tokens"
            return f"row {row} forgets {where}"
        if more := (has & (expected == 0)).nonzero()[:, 0].tolist():
            return f"row {row} gets gradient at its token {more[0]}, which it does not alone"
    return ""


def _beyond_positions(reference: RowsInTraining, computed: int, draws: bool) -> str:
    """What is wrong with a flat row that is longer than a row may be, or an empty string."""
    length, rows = len(reference.rows[0]), len(reference.rows)
    for limit in reference.beyond:
        if limit < computed:
            continue
        copies = limit // (rows * length) + 1
        inputs = row_inputs(reference.model, reference.rows * copies, prefix_sharing=False)
        try:
            with torch.no_grad():
                log_probs = reference.answers(inputs).double().cpu()
        except Exception as error:
            return str(error)  # names the length, and what to change
        wrong = root_mean_square(log_probs - reference.log_probs.repeat(copies, 1))
        if not draws and not wrong <= reference.tolerance * root_mean_square(reference.log_probs):
            return f"a flat row of more than the {limit} positions of its configuration is wrong by {wrong:.1e} nats"
    return ""
