"""The start-up check of models whose batches several processes compute together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from ..core.model import architecture
from ..core.model.backends import ATTENTION_BACKENDS
from ..core.model.flat_model import FlatModel
from ..core.model.mixers import mixers
from ..core.model.routes import Route
from ..core.trainers.proving import StartUpCheck
from .sequence import SequenceGroup, share_batches


@dataclass
class GroupCheck(StartUpCheck):
    """Proves models as the processes of a `group` compute them: on the first route, with and without sharing."""

    group: SequenceGroup = field(kw_only=True)

    def first_route(self, base: PreTrainedModel) -> Route:
        route = super().first_route(base)
        refuse_unshareable(base, route, self.group.size)
        return route

    def routes(self, base: PreTrainedModel, route: Route, fallback: bool) -> Sequence[Route]:
        # Other ways to compute layers that carry state cannot be shared out
        return [each for each in super().routes(base, route, fallback=False) if each.states == route.states]

    def begin(self, base: PreTrainedModel, route: Route) -> None:
        super().begin(base, route)
        share_batches(FlatModel.install(base, route), self.group)


def refuse_unshareable(model: PreTrainedModel, route: Route, size: int) -> None:
    """Reject, before anything is exchanged, a model that `size` processes cannot compute in shares by a route."""
    heads, reason = architecture.config_value(model.config.get_text_config(), "num_attention_heads"), ""
    whole, states = mixers().heads(model)
    if route.backend not in ATTENTION_BACKENDS:
        reason = f"its attention is computed by {route}, which does not take some heads of all tokens"
    elif whole:
        reason = f"its layers of the class {' and '.join(whole)} hand a state on from token to token within whole rows"
    elif states is not None and states < size:
        reason = f"its layers that carry state have {states} heads, and each process needs at least one"
    elif isinstance(heads, int) and heads < size:
        reason = f"it has {heads} attention heads, and each process needs at least one"
    elif any(vars(layer).get("attn_temperature_tuning") for layer in architecture.attention_layers(model)):
        reason = "its layers scale queries by their place on the axis, which slices do not know"
    if reason:
        raise ValueError(
            f"`sequence_parallel_size={size}` cannot serve {type(model).__name__}: {reason}. Set it to less, or to 1."
        )
