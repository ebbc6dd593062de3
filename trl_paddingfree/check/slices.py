"""Slices are proven once, cut small, as training runs them: against the same flat batch, computed whole.

Four long rows go through the model twice. Answers must agree as far as they do with those of padded rows, and gradients
of the last row up to rounding. *Which* tokens carry gradient must agree without any tolerance: a slice that reads keys
which are not on its paths reaches others, and one that misses some reaches fewer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..flat.batch import FlatBatch
from ..flat.slices import cut_by_size
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.forward import is_pooled
from ..model.restored import attributes_set
from ..model.slices import Decision
from .gradients import as_it_answers
from .probe import HALF_DIGITS_FACTOR, NOISE_FACTOR, Call, long_rows, narrowed, rounding_unit, row_inputs
from .training import as_in_training, small_parameters, watched_embeddings

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
    found = []
    with narrowed(model), as_it_answers(model) if skipped else as_in_training(model, call):
        for decision in (Decision(), Decision(cuts)):
            spans = np.diff(decision.cuts or (0, batch.input_ids.size(1))).tolist()
            decided = attributes_set([(flat, "decide", lambda batch, decision=decision: decision)])
            with (
                decided,
                watched_embeddings(model) as embedded,
            ):  # the backward pass computes slices again, hooked alike
                output = (model if call is None else call)(**inputs)
                answers = output.logits if is_pooled(model) else output.log_probs
                own = embedded[: len(spans)] if len(embedded) > 1 else [*embedded]
                if flat.group is not None:  # each process has other tokens
                    own = []
                watched = [] if skipped else [*own, *small_parameters(model)]
                of_all = torch.autograd.grad(answers[-1].sum(), watched, allow_unused=True) if watched else ()
            sizes = spans if len(own) > 1 else [sum(spans)]
            of_tokens = [x[:, :n] for x, n in zip(of_all, sizes, strict=False) if x is not None]
            at_embeddings = torch.cat(of_tokens, 1) if len(of_tokens) == len(own) and own else None
            small = [x.new_zeros(x.shape) if y is None else y for x, y in zip(watched, of_all, strict=True)][len(own) :]
            small = small if flat.group is None else flat.group.summed(small)
            found.append((answers.detach().double(), at_embeddings, small))
        padded = row_inputs(model, rows)
        with torch.no_grad():
            output = (model if call is None else call)(**padded)
            noise = output.logits if is_pooled(model) else output.log_probs
    (whole, embedded_whole, small_whole), (sliced, embedded_sliced, small_sliced) = found
    errors, has_same_tokens = [], True
    if embedded_whole is not None and embedded_sliced is not None:
        reached, expected = ((x != 0).any(-1) for x in (embedded_sliced, embedded_whole))
        has_same_tokens = torch.equal(reached, expected)
        errors.append(_relative(embedded_sliced.double(), embedded_whole.double()))
    largest = max((float(x.norm()) for x in small_whole), default=0.0)
    errors += [_relative(x.double(), y.double(), 0.1 * largest) for x, y in zip(small_sliced, small_whole, strict=True)]
    unit = rounding_unit(model)
    noise = NOISE_FACTOR * max(_relative(noise.double(), whole), unit)
    return SlicesResult(
        num_slices=len(cuts) - 1,
        error=_relative(sliced, whole),
        tolerance=min(noise, HALF_DIGITS_FACTOR * unit**0.5),
        gradients=max(errors, default=float("nan")),
        of_gradients=HALF_DIGITS_FACTOR * unit**0.5,
        skipped=skipped or ("" if errors else "none were in sight"),
        has_same_tokens=has_same_tokens,
    )


def _relative(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    return float((a - b).norm()) / max(float(b.norm()), least, 1e-300)
