"""The start-up check, run by hand: every backend that this machine offers, and how exact it is on a model."""

import gc
import math
from dataclasses import dataclass
from functools import cache, partial

from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from ..core import upstream
from ..core.check.gradients import RowsInTraining
from ..core.check.probe import RowsAlone
from ..core.check.prove import CheckResult, Tell, UnprovenModelError, check_flat, evaluated_too, prove
from ..core.model.backends import BACKENDS
from ..core.model.routes import choose_route, routes_to_try
from ..machine import flash_implementations

# By backend, fastest first: what the check found with and without shared prefixes, or why it cannot run
Backends = dict[str, tuple[list[CheckResult], str]]


@dataclass(frozen=True)
class ModelReport:
    """What the start-up check says about a model on this machine."""

    model: str  # name of its class
    device: str
    dtype: str
    attn_implementation: str
    backends: Backends
    chosen: CheckResult | None = None  # by the route that a trainer would take; `None` if it would refuse the model
    refusal: str = ""  # the error that it would raise then

    def as_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {
            **{name: vars(self)[name] for name in ("model", "device", "dtype", "attn_implementation")},
            "passed": self.chosen is not None,
            "chosen": self.chosen and as_dict(self.chosen),
            "refusal": self.refusal,
            "routes": [
                {"backend": backend, "results": [*map(as_dict, results)], "reasons": reasons}
                for backend, (results, reasons) in self.backends.items()
            ],
        }


def as_dict(result: CheckResult) -> dict[str, object]:
    """What the check found as plain values, for JSON."""
    figures = {name: vars(result)[name] for name in ("error", "tolerance", "noise", "leak", "effect")}
    figures["smallest_mistake"] = result.smallest_mistake
    if result.gradients:
        figures |= {"gradient_error": result.gradients.error, "gradient_tolerance": result.gradients.tolerance}
    return {
        "backend": result.route.backend,
        "attn_implementation": result.route.loaded_with,
        "prefix_sharing": result.prefix_sharing,
        "passed": result.passed,
        "failure": result.failure or (result.gradients.reason if result.gradients else ""),
        "not_compared": [*result.not_compared],
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},  # JSON has no NaN
    }


def load_model(name: str, dtype: str, attn_implementation: str | None) -> PreTrainedModel:
    """Load a model as TRL's trainers do, with TRL's fused LM head, on the GPU if there is one."""
    model = create_model_from_path(name, dtype=dtype, attn_implementation=attn_implementation)
    add_fused_lm_head(model)
    return model


def try_backends(model: PreTrainedModel, tell: Tell) -> Backends:
    """What the check finds with every backend."""
    reference, in_training = RowsAlone(model), cache(partial(RowsInTraining, model))
    in_evaluation = cache(partial(RowsInTraining, model, trains=False, orders=1))
    by_backend: Backends = {}
    for backend in BACKENDS:
        results = []
        try:
            routes, reasons = routes_to_try(model, choose_route(model, backend), fallback=False), ""
        except ValueError as error:
            routes, reasons = [], str(error)
        for route in routes:
            tell(f"Trying {route} ...")
            result = check_flat(model, route, reference, in_training)
            results.append(evaluated_too(model, result, in_evaluation))
            tell(str(results[-1]))
        by_backend[backend] = results, reasons
    return by_backend


def check_model(name: str, dtype: str, attn_implementation: str | None, tell: Tell) -> ModelReport:
    """
    Run the start-up check on a causal language model or a reward model with every backend that this machine offers
    and, unless an `attn_implementation` is given, every installed flash attention package. `tell` is called with each
    step, in words.
    """
    model = load_model(name, dtype, attn_implementation)
    loaded_with = upstream.attn_implementation(model)
    chosen, refusal = None, ""
    try:
        tell("As a trainer would choose ...")
        chosen, _ = prove(model, choose_route(model), tell=tell)
    except UnprovenModelError as error:
        refusal = str(error)
    report = ModelReport(
        model=type(model).__name__,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attn_implementation=loaded_with,
        backends=try_backends(model, tell),
        chosen=chosen,
        refusal=refusal,
    )
    del model  # otherwise, there may be no room to load it again
    for flash in flash_implementations() if attn_implementation is None and report.device != "cpu" else ():
        gc.collect()  # a model and its flat model reference each other
        tried = try_backends(load_model(name, dtype, flash), tell)
        report.backends.update((backend, found) for backend, found in tried.items() if not report.backends[backend][0])
    return report
