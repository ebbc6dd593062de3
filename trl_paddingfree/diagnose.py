"""What a machine offers, and which routes a model can take on it: the start-up check by hand."""

import importlib.util
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from .alone import RowsAlone
from .attention import BACKENDS
from .check import CheckResult, UnprovenModelError, check_flat, layouts, prove
from .forward import choose_route

PACKAGES = ("trl-paddingfree", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy")
OPTIONAL_PACKAGES = ("flash-attn", "kernels", "liger-kernel", "bitsandbytes", "deepspeed", "matplotlib")
ROUTES = (*BACKENDS, "positions", "mask")


@dataclass(frozen=True)
class RouteReport:
    """
    What one route makes of a model.

    Args:
        backend (`str`):
            Name of the route, as for `flat_attention`.
        results (`tuple[CheckResult, ...]`):
            With shared prefixes and without; empty if the model cannot take the route.
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
        routes (`tuple[RouteReport, ...]`):
            Every route, the fastest first.
        chosen (`CheckResult`, *optional*):
            How a trainer would train it; `None` if it would refuse.
        refusal (`str`):
            What the trainer would say then.
    """

    model: str
    device: str
    dtype: str
    attn_implementation: str
    routes: tuple[RouteReport, ...]
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
                {"backend": route.backend, "results": [*map(_as_dict, route.results)], "reasons": route.reasons}
                for route in self.routes
            ],
        }


def _as_dict(result: CheckResult) -> dict[str, Any]:
    figures = {
        name: value if (value := getattr(result, name)) == value else None  # JSON has no NaN
        for name in ("error", "tolerance", "noise", "leak", "effect")
    }
    return {
        "backend": result.route.backend,
        "attn_implementation": result.route.previous,
        "prefix_sharing": result.prefix_sharing,
        "passed": result.passed,
        "failure": result.failure,
        **figures,
    }


def load_model(name: str, dtype: str, attn_implementation: str | None) -> PreTrainedModel:
    """Load a model as TRL's trainers do, with TRL's fused LM head, on the GPU if there is one."""
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model = create_model_from_path(name, dtype=dtype, **options)
    add_fused_lm_head(model)
    return model


def flash_implementations() -> list[str]:
    """The flash attention packages that are installed, by transformers' names."""
    found = {"flash_attention_2": is_flash_attn_2_available(), "flash_attention_3": is_flash_attn_3_available()}
    return [name for name, is_there in found.items() if is_there]


def try_routes(model: PreTrainedModel) -> list[RouteReport]:
    """Check `model` on every route, with shared prefixes and without."""
    reference, reports = RowsAlone(model), []
    for backend in ROUTES:
        try:
            route = choose_route(model, backend)
        except ValueError as error:
            reports.append(RouteReport(backend, reasons=str(error)))
            continue
        ways = layouts(model, backend)
        results = [check_flat(model, route, prefix_sharing=shared, reference=reference) for shared in ways]
        reports.append(RouteReport(backend, tuple(results)))
    return reports


def check_model(name: str, dtype: str = "auto", attn_implementation: str | None = None) -> ModelReport:
    """
    Run the start-up check on every route that this machine offers.

    Args:
        name (`str`):
            Hub name or folder of a causal language model.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype to load it in: `"auto"`, `"float32"`, `"float16"` or `"bfloat16"`.
        attn_implementation (`str`, *optional*):
            Attention implementation to load it with. By default transformers chooses one, and the routes of every
            flash attention package that is installed are tried besides.

    Returns:
        `ModelReport`: Every route, and how a trainer would train the model.
    """
    model, chosen, refusal = load_model(name, dtype, attn_implementation), None, ""
    loaded_with = model.config.get_text_config()._attn_implementation
    try:
        chosen, _ = prove(model, choose_route(model))
    except UnprovenModelError as error:
        refusal = str(error)
    routes = {report.backend: report for report in try_routes(model)}
    for flash in flash_implementations() if attn_implementation is None and model.device.type == "cuda" else ():
        reports = {report.backend: report for report in try_routes(load_model(name, dtype, flash))}
        routes |= {backend: report for backend, report in reports.items() if not routes[backend].results}
    return ModelReport(
        model=type(model).__name__,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attn_implementation=loaded_with,
        routes=tuple(routes[backend] for backend in ROUTES),
        chosen=chosen,
        refusal=refusal,
    )


def package_versions() -> dict[str, str | None]:
    """Versions of what matters; `None` for what is not installed."""
    found: dict[str, str | None] = dict.fromkeys((*PACKAGES, *OPTIONAL_PACKAGES))
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment() -> dict[str, Any]:
    """
    Versions, devices and attention backends, for bug reports.

    Examples:
    ```python
    >>> from trl_paddingfree.diagnose import environment
    >>> [*environment()]
    ['python', 'platform', 'packages', 'cpu_threads', 'gpus', 'attention']

    ```
    """
    gpus = [
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "attention": {
            "flash": flash_implementations() or "no flash attention package installed",
            "varlen": "yes" if has_varlen and gpus else "needs a CUDA GPU",
            "segment": "yes",
            "mask": "yes",
        },
    }
