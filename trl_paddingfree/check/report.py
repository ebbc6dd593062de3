"""The start-up check by hand: every backend that this machine offers, and how exact each is on a model."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from .. import upstream
from ..model.backends import BACKENDS
from ..model.routes import choose_route, routes_to_try
from .gradients import RowsInTraining
from .machine import flash_implementations
from .probe import RowsAlone
from .prove import CheckResult, UnprovenModelError, check_flat, prove


@dataclass(frozen=True)
class BackendReport:
    """
    What one backend makes of a model.

    Args:
        backend (`str`):
            Name of the backend, as for `flat_attention`.
        results (`tuple[CheckResult, ...]`):
            With shared prefixes and without; empty if it cannot serve the model.
        reasons (`str`):
            Why it cannot.
    """

    backend: str
    results: tuple[CheckResult, ...] = ()
    reasons: str = ""


@dataclass(frozen=True)
class ModelReport:
    """
    What the start-up check says of a model, on this machine.

    Args:
        model (`str`):
            Class of the model.
        device, dtype, attn_implementation (`str`):
            How it was loaded.
        backends (`tuple[BackendReport, ...]`):
            Every backend, the fastest first.
        chosen (`CheckResult`, *optional*):
            How a trainer would train it; `None` if it would refuse.
        refusal (`str`):
            What the trainer would say then.
    """

    model: str
    device: str
    dtype: str
    attn_implementation: str
    backends: tuple[BackendReport, ...]
    chosen: CheckResult | None = None
    refusal: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "passed": self.chosen is not None,
            "chosen": None if self.chosen is None else _as_dict(self.chosen),
            "refusal": self.refusal,
            "routes": [
                {"backend": one.backend, "results": [*map(_as_dict, one.results)], "reasons": one.reasons}
                for one in self.backends
            ],
        }


def _as_dict(result: CheckResult) -> dict[str, Any]:
    figures = {
        name: value if math.isfinite(value := getattr(result, name)) else None  # JSON has no NaN
        for name in ("error", "tolerance", "noise", "leak", "effect", "smallest_mistake")
    }
    if result.gradients is not None:
        compared = result.gradients.error == result.gradients.error
        figures["gradient_error"] = result.gradients.error if compared else None
        figures["gradient_tolerance"] = result.gradients.tolerance if compared else None
    return {
        "backend": result.route.backend,
        "attn_implementation": result.route.previous,
        "prefix_sharing": result.prefix_sharing,
        "passed": result.passed,
        "failure": result.failure or ("" if result.gradients is None else result.gradients.reason),
        **figures,
    }


def load_model(name: str, dtype: str, attn_implementation: str | None) -> PreTrainedModel:
    """Load a model as TRL's trainers do, with TRL's fused LM head, on the GPU if there is one."""
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model = create_model_from_path(name, dtype=dtype, **options)
    add_fused_lm_head(model)
    return model


def try_backends(model: PreTrainedModel) -> list[BackendReport]:
    """Check `model` with every backend, with shared prefixes and without."""
    reference, in_training, reports = RowsAlone(model), cache(partial(RowsInTraining, model)), []
    for backend in BACKENDS:
        try:
            route = choose_route(model, backend)
        except ValueError as error:
            reports.append(BackendReport(backend, reasons=str(error)))
            continue
        routes = routes_to_try(model, route, fallback=False)
        reports.append(BackendReport(backend, tuple(check_flat(model, r, reference, in_training) for r in routes)))
    return reports


def check_model(name: str, dtype: str = "auto", attn_implementation: str | None = None) -> ModelReport:
    """
    Run the start-up check with every backend that this machine offers.

    Args:
        name (`str`):
            Hub name or folder of a causal language model.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype to load it in: `"auto"`, `"float32"`, `"float16"` or `"bfloat16"`.
        attn_implementation (`str`, *optional*):
            Attention implementation to load it with. By default transformers chooses one, and every flash attention
            package that is installed is tried besides.

    Returns:
        `ModelReport`: Every backend, and how a trainer would train the model.
    """
    model, chosen, refusal = load_model(name, dtype, attn_implementation), None, ""
    loaded_with = upstream.attn_implementation(model)
    try:
        chosen, _ = prove(model, choose_route(model))
    except UnprovenModelError as error:
        refusal = str(error)
    backends = {report.backend: report for report in try_backends(model)}
    for flash in flash_implementations() if attn_implementation is None and model.device.type == "cuda" else ():
        reports = {report.backend: report for report in try_backends(load_model(name, dtype, flash))}
        backends |= {backend: report for backend, report in reports.items() if not backends[backend].results}
    return ModelReport(
        model=type(model).__name__,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attn_implementation=loaded_with,
        backends=tuple(backends[backend] for backend in BACKENDS),
        chosen=chosen,
        refusal=refusal,
    )
