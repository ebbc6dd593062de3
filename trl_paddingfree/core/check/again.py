"""The start-up check of slices and of compiled code: a flat batch against the same one computed whole and eager."""

from contextlib import nullcontext
from dataclasses import replace

from transformers import PreTrainedModel

from ..model.flat_model import FlatModel
from . import probe
from .comparison import Verdict
from .gradients import RowsInTraining
from .prove import Agree, UnprovenModelError, draws_of

# Tokens of a slice: with these, some cuts lie within prefixes, and some within what follows them
_SIZE = 45


def check_slices(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    skipped: str = "",
    draw: int = 0,
    is_compiled: bool = False,
) -> Verdict:
    """
    Compute a flat batch whole and in slices, with windows shorter than its rows, and compare the two. With
    `is_compiled`, compare eager and compiled code on the whole batch instead. Leaves the model as it was.

    `call` is called in place of `model`: the same model under a wrapper. `skipped` says why no gradients are compared;
    if given, nothing is differentiated. Each `draw` has other rows.
    """
    flat = FlatModel.of(model)
    assert flat is not None
    # Narrowed windows would be compiled separately
    with nullcontext() if is_compiled else probe.narrowed(model):
        reference = RowsInTraining(model, call, draw, trains=not skipped, scores_all=True)
        with reference.in_training():
            size = None if is_compiled else min(_SIZE, reference.length)
            found = reference.compare(flat.route.prefix_sharing, size, is_compiled)
    missing = f"gradients were not compared, because {skipped}"
    return replace(found, notes=(missing, *found.notes)) if skipped else found


def prove_slices(
    model: PreTrainedModel,
    call: probe.Call | None = None,
    *,
    skipped: str = "",
    is_compiled: bool = False,
    agree: Agree = bool,
) -> Verdict:
    """
    What [`check_slices`] finds in the first of a few draws that passes on all processes, as `agree` tells.

    Raises:
        [`UnprovenModelError`]: If no draw passes.
    """
    for draw in range(draws_of(model)):
        found = check_slices(model, call, skipped=skipped, draw=draw, is_compiled=is_compiled)
        if agree(found.passed):
            return found
    how, options = "slices of a flat batch differently from the whole", "`max_tokens_per_micro_batch`, `memory_budget`"
    if is_compiled:
        how, options = "flat batches by compiled code differently from eager ones", "`torch_compile`"
    raise UnprovenModelError(
        f"{type(model).__name__} computes {how} ({found}): training would be wrong. Leave {options} out."
    )
