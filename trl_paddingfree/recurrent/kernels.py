"""The functions by which transformers' layers that carry state mix tokens, and the packages with kernels for them."""

import importlib
import inspect
import types
from collections.abc import Callable

import torch

# Convolutions and recurrences: the argument that tells their kernels where rows begin, and the package that has these.
# No kernel for Mamba 1's scan has such an argument
_FUNCTIONS = {
    "causal_conv1d_fn": ("seq_idx", "causal_conv1d"),
    "mamba2_chunk_scan": ("seq_idx", "mamba_ssm"),
    "mamba_selective_scan": (None, "mamba_ssm"),
    "torch_chunk_gated_delta_rule": ("cu_seqlens", "fla"),
    "chunk_kimi_delta_attention": ("cu_seqlens", "fla"),
}
# Under which name each package is installed
_DISTRIBUTIONS = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "fla": "flash-linear-attention"}
# Convolution and scan fused in one kernel. If it is not installed, they are `None`, and the two are called separately
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")


def functions_of(forward: Callable) -> dict[str, Callable]:
    """The functions above that a layer's forward calls, by name."""
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    if not isinstance(function, types.FunctionType):
        return {}
    called = {*_FUNCTIONS, *_FUSED}.intersection(function.__code__.co_names)
    return {name: function.__globals__[name] for name in sorted(called)}


def is_installed(package: str) -> bool:
    """Whether transformers can take kernels from a package: it tries to import these when it is imported itself."""
    try:
        importlib.import_module(package)
    except Exception:  # transformers takes its own functions then, whatever is wrong
        return False
    return True


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the forward of a module is that of its class: `kernels` sets that one, too, if the hub has no other."""
    given = vars(module).get("forward")
    return given is None or getattr(given, "__func__", given) is type(module).forward


def _missing_package(name: str, function: Callable) -> str | None:
    """What to install for the kernel of a function; empty if nothing has one, `None` if it is installed."""
    boundaries, package = _FUNCTIONS[name]
    if isinstance(function, torch.nn.Module) and not has_own_forward(function):
        return None  # transformers has put a kernel of the hub there
    # A function without transformers' decorator has no kernel (LFM3)
    if boundaries and not hasattr(function, "__wrapped__") and not isinstance(function, torch.nn.Module):
        return ""
    return None if is_installed(package) else _DISTRIBUTIONS[package]


def missing_kernels(forward: Callable) -> dict[str, str | None]:
    """The result of [`_missing_package`] for each of these functions that a layer's forward calls, but fused ones."""
    functions = functions_of(forward).items()
    return {name: _missing_package(name, function) for name, function in functions if name in _FUNCTIONS}


def takes_boundaries(module: torch.nn.Module) -> bool:
    """Whether a layer that carries state keeps rows on a flat axis apart when it is told where they begin."""
    forward = type(module).forward
    if inspect.getfullargspec(inspect.unwrap(forward)).varkw is None:
        return False  # before transformers 5.22, the convolution of LFM2's MoE takes no boundaries by these names
    missing = missing_kernels(forward)
    return bool(missing) and all(_FUNCTIONS[name][0] and package is None for name, package in missing.items())
