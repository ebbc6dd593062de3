"""Routes: how a model computes flat batches, and which to try, in which order."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from .. import upstream
from . import architecture
from .backends import ATTENTION_BACKENDS, BACKENDS, BackendName, describe, reasons_against, slower_backends
from .state_layers import carries_state, goes_along_tree


@dataclass(frozen=True)
class Route:
    """The way in which a model computes flat batches."""

    backend: BackendName
    previous: str  # the attention implementation that the model was loaded with
    prefix_sharing: bool  # whether prefixes that rows share are computed once
    states: Literal["tree", "rows"] = "rows"  # what layers that carry state go along, where they can; else "rows"

    def __str__(self) -> str:
        sharing = "shared prefixes" if self.prefix_sharing else "no shared prefixes"
        states = ", states along the tree" if self.states == "tree" else ""
        return f"{describe(self.backend, self.previous)}, {sharing}{states}"

    def without_sharing(self) -> "Route":
        """The same route without shared prefixes."""
        return replace(self, prefix_sharing=False)


def choose_route(
    model: PreTrainedModel,
    backend: str = "auto",
    *,
    prefix_sharing: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Route:
    """
    Choose how `model` computes flat batches: by the fastest backend that can serve it (`"auto"`), or by one that is
    then used, or refused with every reason. Attention will run in `dtype` on `device`, by default the model's.
    """
    previous = str(upstream.attn_implementation(model))  # of ours, what it stands in for
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} keeps its backbone under another name than its `base_model_prefix` "
            f"({model.base_model_prefix!r}), and TRL's fused LM head does not find it, with padding or without. Set "
            "`model.base_model_prefix = 'model'` before you make the trainer."
        )
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"`flat_attention={backend!r}` is not one of 'auto', {', '.join(map(repr, BACKENDS))}.")
    reasons = reasons_against(model, previous, dtype or model.dtype, device or model.device)
    if backend == "varlen":  # "auto" may still take it for those layers that it can serve
        beyond = architecture.beyond_varlen(model)
        reasons["varlen"] += [f"attention has {what}, and the kernel has not" for what in beyond]
    wanted = [name for name in BACKENDS if backend in ("auto", name)]
    if (found := next((name for name in wanted if not reasons[name]), None)) is None:
        listed = "\n    ".join(dict.fromkeys(reason for name in wanted for reason in reasons[name]))
        raise ValueError(f"`flat_attention={backend!r}` cannot serve this model:\n    {listed}")
    shares = prefix_sharing and not why_not_to_share(found, previous)
    return Route(found, previous, shares, "tree" if goes_along_tree(model) else "rows")


def why_not_to_share(backend: BackendName, previous: str) -> str:
    """Why a model cannot share prefixes with a backend, whatever a check would say; empty if that has to be tried."""
    if backend == "positions":
        return f"{previous!r} is told of sequences, not of trees; load the model with 'sdpa' to share them"
    return ""


def refuse_unsliceable(model: PreTrainedModel, route: Route, size: int) -> None:
    """Refuse a model that `size` processes cannot compute in slices by a route, before anything is exchanged."""
    heads, reason = architecture.config_value(model.config.get_text_config(), "num_attention_heads"), ""
    if route.backend not in ATTENTION_BACKENDS:
        reason = f"its attention is computed by {route}, which does not take some heads of all tokens"
    elif carries_state(model):
        reason = "it has layers that hand a state on from token to token, each of which needs all tokens"
    elif isinstance(heads, int) and heads < size:
        reason = f"it has {heads} attention heads, of which each process needs one"
    elif any(vars(layer).get("attn_temperature_tuning") for layer in architecture.attention_layers(model)):
        reason = "its layers scale queries by their place on the axis, which slices do not know"
    if reason:
        raise ValueError(
            f"`sequence_parallel_size={size}` cannot serve {type(model).__name__}: {reason}. Set it to less, or to 1."
        )


def routes_to_try(model: PreTrainedModel, route: Route, *, fallback: bool = True) -> list[Route]:
    """`route`, with and without sharing, then, with `fallback`, those of slower backends; along the tree first."""
    backends = [route.backend, *(slower_backends(route.backend, route.previous) if fallback else ())]
    routes: list[Route] = []
    for backend in backends:
        shares = route.prefix_sharing and not why_not_to_share(backend, route.previous)
        for sharing in (True, False) if shares else (False,):
            alike = replace(route, backend=backend, prefix_sharing=sharing)
            routes += [alike, replace(alike, states="rows")] if route.states == "tree" else [alike]
    return routes
