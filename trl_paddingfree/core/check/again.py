"""The start-up check of other ways to compute a flat batch, each against the same batch, whole and by eager code."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..model.flat_model import FlatModel
from . import probe
from .comparison import Verdict
from .gradients import RowsInTraining, Vary
from .prove import Agree, UnprovenModelError, draws_of


@dataclass(frozen=True)
class Variation:
    """Another way to compute flat batches, by options that ask for it. Slices and compiled layers are such ways."""

    name: str  # begins a sentence
    differs: str  # what a model does that is refused
    options: str
    vary: Vary
    narrows: bool = True  # whether windows shorter than the rows are tried
    lasts: bool = True  # whether a verdict may be remembered
    serves: Callable[[FlatModel], bool] = lambda flat_model: True  # whether a model is ever computed this way


def check_again(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    variation: Variation,
    skipped: str = "",
    draw: int = 0,
) -> Verdict:
    """
    Compute a flat batch as it is and in another way, and compare the two. Leaves the model as it was.

    `call` is called in place of `model`: the same model under a wrapper. `skipped` says why no gradients are compared;
    if given, nothing is differentiated. Each `draw` has other rows.
    """
    flat = FlatModel.of(model)
    assert flat is not None
    with probe.narrowed(model) if variation.narrows else nullcontext():
        reference = RowsInTraining(model, call, draw, trains=not skipped, scores_all=True)
        with reference.in_training():
            found = reference.compare(flat.route.prefix_sharing, variation.vary)
    missing = f"gradients were not compared, because {skipped}"
    return replace(found, notes=(missing, *found.notes)) if skipped else found


def prove_again(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    variation: Variation,
    skipped: str = "",
    agree: Agree = bool,
) -> Verdict:
    """
    What [`check_again`] finds in the first of a few draws that passes on all processes, as `agree` tells.

    Raises:
        [`UnprovenModelError`]: If no draw passes.
    """
    for draw in range(draws_of(model)):
        found = check_again(model, call, variation=variation, skipped=skipped, draw=draw)
        if agree(found.passed):
            return found
    raise UnprovenModelError(
        f"{type(model).__name__} computes {variation.differs} ({found}): training would be wrong. Leave "
        f"{variation.options} out."
    )
