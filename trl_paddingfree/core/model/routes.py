"""Routes: how a model computes flat batches, the reasons against each, and which to try."""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import upstream
from . import architecture, kernels
from .backends import ATTENTION_BACKENDS, BACKENDS, DESCRIPTIONS, BackendName
from .mixers import Way, mixers

logger = logging.get_logger(__name__)


def describe(backend: BackendName, loaded_with: str) -> str:
    """A description of what a backend does on a model loaded with the attention implementation `loaded_with`."""
    return f"{backend}: {DESCRIPTIONS[backend].format(loaded_with=loaded_with)}"


def takes_boundaries(loaded_with: str) -> bool:
    """Whether an attention implementation takes boundaries, not masks: flash attention and kernels from the hub."""
    return "flash" in loaded_with or "/" in loaded_with


@dataclass(frozen=True)
class Route:
    """How a model computes flat batches."""

    backend: BackendName
    loaded_with: str  # the attention implementation that the model was loaded with
    prefix_sharing: bool  # whether prefixes that rows share are computed once
    states: Way = "rows"  # "tree": layers that carry state compute shared prefixes once, if able

    def __str__(self) -> str:
        states = ", states along the tree" if self.states == "tree" else ""
        return (
            f"{describe(self.backend, self.loaded_with)}, {'' if self.prefix_sharing else 'no '}shared prefixes{states}"
        )

    def without_sharing(self) -> "Route":
        """The same route without shared prefixes."""
        return replace(self, prefix_sharing=False)


def reasons_against(
    model: PreTrainedModel, loaded_with: str, dtype: torch.dtype, device: torch.device
) -> dict[BackendName, list[str]]:
    """Why each backend cannot serve a model loaded with `loaded_with` whose attention runs in `dtype` on `device`."""
    reasons: dict[BackendName, list[str]] = {name: [] for name in BACKENDS}

    def note(reason: str, *names: BackendName) -> None:
        for name in names:
            reasons[name].append(reason)

    if not upstream.takes_attention_function(model):
        note(f"{type(model).__name__} does not use transformers' `AttentionInterface`", *ATTENTION_BACKENDS)
    if takes_boundaries(loaded_with):
        note(f"the model was loaded with `attn_implementation={loaded_with!r}`, which does the same", "varlen")
        note(f"`attn_implementation={loaded_with!r}` takes no mask: load the model with 'sdpa'", "segment", "mask")
    else:
        how = "load it with 'flash_attention_2' (`pip install flash-attn`), another version of it, or a hub kernel"
        note(f"the model was loaded with `attn_implementation={loaded_with!r}`: {how}", "flash", "positions")
    if loaded_with != "sdpa":
        note(f"it stands in for 'sdpa', and the model was loaded with {loaded_with!r}", "varlen")
    if reason := kernels.why_no_varlen(device):
        note(reason, "varlen")
    if dtype not in (torch.float16, torch.bfloat16):
        note(f"attention runs in {dtype}, the kernel needs float16 or bfloat16", "varlen")
    if dropout := architecture.attention_dropout(model):
        what = f"attention has a dropout of {dropout}, and the kernel has none"
        note(f"{what}: set it to 0 in the model's configuration", "varlen")
    if loaded_with == "flex_attention":
        note("flex_attention takes block masks: load the model with 'sdpa'", "segment", "mask")
    return reasons


def choose_route(
    model: PreTrainedModel,
    backend: str = "auto",
    *,
    prefix_sharing: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Route:
    """
    Choose how `model` computes flat batches: `"auto"` takes the fastest backend that can serve it; a backend given by
    name is used, or rejected with every reason against it (`ValueError`). Attention will run in `dtype` on `device`, by
    default the model's.
    """
    loaded_with = str(upstream.attn_implementation(model))  # a `StandIn` reads as the name that it stands in for
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} keeps its backbone under another name than its `base_model_prefix` "
            f"({model.base_model_prefix!r}), and TRL's fused LM head does not find it, with padding or without. Set "
            "`model.base_model_prefix = 'model'` before you make the trainer."
        )
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"`flat_attention={backend!r}` is not one of 'auto', {', '.join(map(repr, BACKENDS))}.")
    device = device or model.device
    reasons = reasons_against(model, loaded_with, dtype or model.dtype, device)
    if backend == "varlen":  # "auto" may still take it for those layers that it can serve
        beyond = architecture.beyond_varlen(model)
        reasons["varlen"] += [f"attention has {what}, which the kernel does not support" for what in beyond]
    wanted = [name for name in BACKENDS if backend in ("auto", name)]
    if (chosen := next((name for name in wanted if not reasons[name]), None)) is None:
        listed = "\n    ".join(dict.fromkeys(reason for name in wanted for reason in reasons[name]))
        raise ValueError(f"`flat_attention={backend!r}` cannot serve this model:\n    {listed}")
    if backend == "auto" and chosen == "segment" and device.type == "cuda":
        logger.warning_once(
            f"{type(model).__name__} trains with {describe(chosen, loaded_with)}, because PyTorch's flash attention "
            f"cannot serve it: {'; '.join(reasons['varlen'])}. Results are exact, but attention is called once for "
            "each group of segments instead of once for all: the more the lengths of a batch differ, the slower."
        )
    shares = prefix_sharing and not why_not_to_share(chosen, loaded_with)
    return Route(chosen, loaded_with, shares, mixers().way(model))


def why_not_to_share(backend: BackendName, loaded_with: str) -> str:
    """Why a backend rules out sharing prefixes, on any model; empty if only a check can tell."""
    if backend == "positions":
        return f"{loaded_with!r} takes no trees of prefixes; load the model with 'sdpa' to share them"
    return ""


def routes_to_try(model: PreTrainedModel, route: Route, *, fallback: bool = True) -> list[Route]:
    """`route` with and without sharing, then slower backends if `fallback`; states along the tree come first."""
    backends: list[BackendName] = [route.backend]
    if fallback:  # backends that ask less of a model: its own attention over segments, or with its own arguments
        backends += ["segment"] if route.backend == "varlen" else []
        backends += ["positions" if takes_boundaries(route.loaded_with) else "mask"]
    routes: list[Route] = []
    for backend in dict.fromkeys(backends):
        shares = route.prefix_sharing and not why_not_to_share(backend, route.loaded_with)
        for sharing in (True, False) if shares else (False,):
            alike = replace(route, backend=backend, prefix_sharing=sharing)
            routes += [alike, replace(alike, states="rows")] if route.states == "tree" else [alike]
    return routes
