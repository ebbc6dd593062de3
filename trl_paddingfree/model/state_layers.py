"""Layers that hand something on from token to token, while all else stays flat and shared.

Most of them go along the tree: they run flat and hand the state at a fork on, see `state_tree`. The others see rows,
see `state_rows`. The layout comes in the argument in which the layer expects a mask, or its state.
"""

import functools
import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.layout import FlatLayout
from .masks import BOUNDARIES, FlatMask
from .state_rows import is_layout, on_rows
from .state_tree import tree_functions, with_functions

# Names of children and buffers by which layers are known that mix tokens and have no convolution module: RWKV's shift
# by one token, xLSTM's recurrence, MiniMax's decay, DeepSeek V4's compressed keys. Inkling's attention counts the
# distance of tokens along its input
_MARKS = {"time_shift", "mlstm_backend", "slope_rate", "compressor", "rel_logits_proj"}


def is_state_layer(module: torch.nn.Module) -> bool:
    """Whether `module` has a short convolution, which goes before every recurrence that has kernels."""
    # PEFT puts a layer of its own around a convolution that it adapts
    children = [dict(child.named_children()).get("base_layer", child) for child in module.children()]
    return any(isinstance(child, torch.nn.Conv1d) for child in children)


def _hands_on(module: torch.nn.Module) -> bool:
    """Whether `module` hands something on from token to token, beside attention."""
    named = (*module.named_children(), *module.named_buffers(recurse=False))
    return is_state_layer(module) or any(name in _MARKS for name, _ in named)


def state_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of `model` that hand something on from token to token, without those inside of others."""
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    # An encoder of sound beside the layers (Phi-4 multimodal) has convolutions too
    stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
    for module in (module for stack in stacks for module in stack.modules()):
        if module not in inside and _hands_on(module):
            found.append(module)
            inside.update(module.modules())
    return found


def carries_state(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` hands something on from token to token, beside attention."""
    return bool(state_layers(model))


def missing_kernels(model: PreTrainedModel) -> list[str]:
    """Packages whose kernels would compute the rows, or the pieces, of these layers in one call, sorted."""
    missing = [upstream.missing_state_kernels(_own_forward(layer)).values() for layer in state_layers(model)]
    return sorted({package for packages in missing for package in packages if package})


def _own_forward(layer: Any) -> Callable[..., Any]:
    """The forward that a layer has without ours: that of its class, unless the instance was given another."""
    installed = _installed(layer)
    previous = vars(layer).get("forward") if installed is None else installed.previous
    return _rebound(previous, layer) if previous else types.MethodType(type(layer).forward, layer)


def _installed(layer: Any) -> "StateForward | None":
    """What [`install_state_layers`] gave the forward of a layer, or of the layer that it is a copy of."""
    return getattr(layer.forward, "state", None)  # attributes of methods are their functions'; partials have none


def _can_go_along_tree(layer: torch.nn.Module) -> bool:
    """Whether a layer calls functions that can be given the state at a fork, and that ours can stand in for."""
    forward = _own_forward(layer)
    if not is_state_layer(layer) or not upstream.state_functions(forward):
        return False
    with suppress(TypeError):
        with_functions(forward, {})
        return True
    return False


def goes_along_tree(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` that carries state can go along the tree."""
    return any(map(_can_go_along_tree, state_layers(model)))


def repeats_prefixes(model: PreTrainedModel) -> bool:
    """Whether any layer of `model`, as it is installed, sees rows: it computes a shared prefix again for each."""
    return not all(map(_is_along_tree, state_layers(model)))


def _is_along_tree(layer: torch.nn.Module) -> bool:
    installed = _installed(layer)
    return _can_go_along_tree(layer) if installed is None else installed.along_tree


def describe_state_layers(model: PreTrainedModel) -> str:
    """How the layers of `model` that carry state are computed, and what would be faster; empty if it has none."""
    kinds: dict[str, set[str]] = {}
    for layer in state_layers(model):
        how = "along the tree, each token once"
        if not _is_along_tree(layer):
            joined = upstream.takes_state_boundaries(layer)
            how = "all rows in one call of their kernels" if joined else "rows of like length in one call"
        kinds.setdefault(how, set()).add(type(layer).__name__)
    if not kinds:
        return ""
    said = "; ".join(f"{how} ({', '.join(sorted(names))})" for how, names in sorted(kinds.items()))
    packages = missing_kernels(model)
    faster = f" `pip install {' '.join(packages)}` (on GPUs) for faster kernels." if packages else ""
    return f"Layers that carry state: {said}.{faster}"


@dataclass
class StateForward:
    """What the forward of a layer knows of flat batches."""

    layer: "weakref.ref[torch.nn.Module]"  # a copy of the layer comes with the same forward
    previous: Callable[..., Any] | None  # the forward that the instance had; `None` if it had that of its class
    along_tree: bool = False  # if not, the layer sees rows
    kernels: frozenset[str] = frozenset()  # those of transformers' functions that it calls which have kernels
    takes_boundaries: bool = False  # whether all of them keep the rows of one long axis apart


def install_state_layers(model: PreTrainedModel, along_tree: bool) -> None:
    """Have layers that carry state read flat layouts: `along_tree` where they can, else as rows. May be repeated."""
    for layer in state_layers(model):
        state = _installed(layer)
        if state is None or state.layer() is not layer:
            previous = vars(layer).get("forward") if state is None else state.previous
            state = StateForward(weakref.ref(layer), previous)
            _install(layer, state)
        missing = upstream.missing_state_kernels(_own_forward(layer))
        state.along_tree = along_tree and _can_go_along_tree(layer)
        state.kernels = frozenset(name for name, package in missing.items() if package is None)
        state.takes_boundaries = upstream.takes_state_boundaries(layer)


def _install(layer: torch.nn.Module, state: StateForward) -> None:
    @functools.wraps(type(layer).forward)
    @torch.compiler.disable(recursive=False)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = _own_forward(self)
        mask = next(filter(is_layout, (*args, *kwargs.values())), None)
        if mask is None:
            return call(*args, **kwargs)
        if state.along_tree:
            return _along_tree(call, mask.flat_layout, state.kernels, args, kwargs)
        return on_rows(self, call, mask, state.takes_boundaries, args, kwargs)

    forward.state = state  # type: ignore[attr-defined]
    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


def _rebound(method: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """`method` as that of `module`, where it was another's: a copy of a module computes with its own weights."""
    return types.MethodType(method.__func__, module) if isinstance(method, types.MethodType) else method


class _NoCache:
    """A cache that holds nothing but the mask that carries the layout, in place of every layer's state."""

    def __init__(self, mask: FlatMask):
        self.rnn_state: dict[int, FlatMask] = defaultdict(lambda: mask)

    def __bool__(self) -> bool:
        return False


def state_arguments(backbone: torch.nn.Module, layout: FlatLayout) -> dict[str, Any]:
    """Arguments by which the layout reaches the layers of a backbone without attention: it takes no dict of masks."""
    expected = inspect.signature(backbone.forward).parameters
    if "past_key_values" in expected:
        return {}
    mask = FlatMask.carrying(layout, per_token=True)
    if "state" in expected:  # RWKV
        return {"attention_mask": None, "state": mask}
    if "attention_mask" not in expected:  # xLSTM
        return {"attention_mask": None, "cache_params": _NoCache(mask)}
    return {"attention_mask": mask}


@torch.compiler.disable  # the layout of each batch would be compiled into its code
def _along_tree(call: Callable, layout: FlatLayout, kernels: Collection[str], args: tuple, kwargs: dict) -> Any:
    """Call a layer on flat tokens, without a mask, with functions that know of the tree; `kernels` have kernels."""
    functions = tree_functions(layout, upstream.state_functions(call), kernels)
    without = [None if is_layout(value) else value for value in args]
    told = {name: None if is_layout(value) else value for name, value in kwargs.items() if name not in BOUNDARIES}
    return with_functions(call, functions)(*without, **told)
