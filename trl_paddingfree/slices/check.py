"""The start-up check of slices: a flat batch in slices against the same one, whole."""

from contextlib import AbstractContextManager, nullcontext

from ..core.check.again import Variation
from ..core.flat.batch import FlatBatch
from ..core.flat.schedule import Schedule
from .axis import cut_by_size
from .passes import scheduled, why_whole

# Tokens of a slice: with these, some cuts lie within prefixes, and some within what follows them
_SIZE = 45


def _cut(batch: FlatBatch) -> AbstractContextManager[FlatBatch]:
    size = min(_SIZE, batch.row_index.size(1))
    return nullcontext(scheduled(batch, Schedule(cut_by_size(batch.layout.segments, size))))


IN_SLICES = Variation(
    name="Slices within the budget",
    differs="slices of a flat batch differently from the whole",
    options="`max_tokens_per_micro_batch`, `memory_budget`",
    vary=_cut,
    serves=lambda flat_model: not why_whole(flat_model),
)
