"""What slices add to a pass: a batch that is scheduled in slices is computed in them, by models that can."""

from collections.abc import Iterable
from dataclasses import replace

from ..core.flat.batch import FlatBatch
from ..core.flat.schedule import Schedule
from ..core.model.architecture import rotary_limits
from ..core.model.backends import ATTENTION_BACKENDS
from ..core.model.flat_model import FlatModel
from ..core.model.hooks import PassHook
from ..core.model.restored import Change
from .decoder import in_slices


class InSlices(PassHook):
    """Has the decoder compute a batch in the slices of its schedule."""

    def begin(self, flat_model: FlatModel, batch: FlatBatch) -> FlatBatch:
        return scheduled(batch, Schedule()) if why_whole(flat_model) else batch  # it was made for another model

    def changes(self, flat_model: FlatModel, batch: FlatBatch) -> Iterable[Change]:
        return [in_slices(flat_model, batch)]


def scheduled(batch: FlatBatch, schedule: Schedule) -> FlatBatch:
    """A batch that is to be computed by a `schedule`, in slices if that cuts it."""
    others = tuple(hook for hook in batch.hooks if not isinstance(hook, InSlices))
    return replace(batch, schedule=schedule, hooks=(*others, InSlices()) if schedule.cuts else others)


def why_whole(flat_model: FlatModel) -> str:
    """Why a model cannot compute a flat batch in slices, one after another; empty if it can."""
    route, model = flat_model.route, flat_model.model
    if route.backend not in ATTENTION_BACKENDS:
        return f"its attention is computed by {route}, which takes no keys of earlier slices"
    config, why = model.config.get_text_config(), "it has layers that hand a state on from token to token, and"
    if vars(config).get("layerdrop"):
        return "it leaves out layers at random (`layerdrop`), and other ones in each slice: set it to 0"
    if not flat_model.mixers.found(model):
        return ""
    if flat_model.repeats:
        return f"{why} compute each row by itself"
    if rotary_limits(config):
        return f"{why} frequencies that follow the longest row"
    return f"{why} {flat_model.peers.name}" if flat_model.peers.name else ""
