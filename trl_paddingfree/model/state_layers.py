"""Layers that carry state from token to token (recurrences, short convolutions), in models that are otherwise flat.

Most of them go along the tree: they run flat, and every branch goes on from the state at its fork, see `state_tree`.
The others see rows: each segment's whole path as one row, which starts from a zero state, and of whose outputs those of
the segment's own tokens are kept. So these layers compute a prefix once for each segment that continues it. The layout
comes in the argument in which the layer expects a mask, or its state.
"""

import functools
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.batch import Inputs
from ..flat.layout import FlatLayout, Gather, once_per_layout
from ..flat.pieces import PathRows
from ..flat.segments import Segments
from .architecture import CACHES, config_value
from .masks import BOUNDARIES, FlatMask, PassContext, boundaries, causal_mask
from .restored import attributes_set, mark_of
from .state_tree import step_cost, tree_functions, with_functions

# Where a layer keeps its [`StateForward`]: copies of the layer come with copies of it
ATTRIBUTE = "flat_state"

# Children and buffers that tell layers which carry state without a convolution module: RWKV's shift by one token,
# xLSTM's recurrence, MiniMax's decay, DeepSeek V4's compressed keys; and the attention of Inkling and Inkling 2, which
# counts the distance of tokens along its input
_MARKS = {"time_shift", "mlstm_backend", "slope_rate", "compressor", "rel_logits_proj", "relative_position_bias"}
# Tokens of a small chunk: fewer than most pieces have
_SMALL_CHUNK = 8

# Where layers keep how many heads their state has: delta rules, and all others
_STATE_HEADS = ("num_v_heads", "num_heads")


def is_state_layer(module: torch.nn.Module) -> bool:
    """Whether `module` has a short convolution, which goes before every recurrence that has kernels."""
    # PEFT puts a layer of its own around a convolution that it adapts
    return any(isinstance(getattr(child, "base_layer", child), torch.nn.Conv1d) for child in module.children())


def state_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of `model` that hand something on from token to token, without those inside of others."""
    # Not an audio encoder beside the layers (Phi-4 multimodal), which has convolutions too
    stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
    return [*dict.fromkeys(layer for stack in stacks for layer in _outermost(stack))]


def _outermost(module: torch.nn.Module) -> list[torch.nn.Module]:
    named = (*module.named_children(), *module.named_buffers(recurse=False))
    if is_state_layer(module) or not _MARKS.isdisjoint(dict(named)):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


def carries_state(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` hands something on from token to token, beside attention."""
    return bool(state_layers(model))


def missing_kernels(model: PreTrainedModel) -> list[str]:
    """Packages whose kernels would compute the rows, or the pieces, of these layers in one call, sorted."""
    forwards = map(_own_forward, state_layers(model))
    return sorted({package for own in forwards for package in upstream.missing_state_kernels(own).values() if package})


def _own_forward(layer: torch.nn.Module) -> Callable:
    """The forward that a layer has without ours."""
    return (_installed(layer) or layer).forward


def _installed(layer: torch.nn.Module) -> "StateForward | None":
    """The [`StateForward`] of a layer, if its forward is still ours or has ours inside: others may have replaced it."""
    return vars(layer)[ATTRIBUTE] if mark_of(layer, ATTRIBUTE) else None


def can_go_along_tree(layer: torch.nn.Module) -> bool:
    """Whether a layer calls functions that take an initial state, and that ours can replace."""
    forward = _own_forward(layer)
    if not is_state_layer(layer) or not upstream.state_functions(forward):
        return False
    with suppress(TypeError):
        with_functions(forward, {})
        return True
    return False


def state_heads(model: PreTrainedModel) -> int | None:
    """The fewest heads that the state of any layer has; `None` if none has heads (but channels, or no state)."""
    parts = [vars(part) for layer in state_layers(model) for part in layer.modules()]
    return min((held[name] for held in parts for name in _STATE_HEADS if isinstance(held.get(name), int)), default=None)


def repeats_prefixes(model: PreTrainedModel) -> bool:
    """Whether any layer of `model`, as it is installed, sees rows: it computes a shared prefix again for each."""
    return not all(map(_is_along_tree, state_layers(model)))


def _is_along_tree(layer: torch.nn.Module) -> bool:
    state = _installed(layer)
    return can_go_along_tree(layer) if state is None else state.along_tree


def describe_state_layers(model: PreTrainedModel) -> str:
    """How the layers of `model` that carry state are computed, and what would be faster; empty if it has none."""
    kinds = defaultdict[str, set[str]](set)
    for layer in state_layers(model):
        how = "along the tree, each token once"
        if not _is_along_tree(layer):
            joined = upstream.takes_state_boundaries(layer)
            how = "all rows in one call of their kernels" if joined else "rows of like length in one call"
        kinds[how].add(type(layer).__name__)
    if not kinds:
        return ""
    said = "; ".join(f"{how} ({', '.join(sorted(names))})" for how, names in sorted(kinds.items()))
    packages = missing_kernels(model)
    faster = f" `pip install {' '.join(packages)}` (on GPUs) for faster kernels." if packages else ""
    return f"Layers that carry state: {said}.{faster}"


def in_small_chunks(model: PreTrainedModel) -> AbstractContextManager[None]:
    """
    Within this context, recurrences that plain PyTorch computes in chunks have chunks of a few tokens, as the pieces
    of a tree may: the same results, rounded otherwise.
    """
    changed: list[tuple[object, str, object]] = []
    for layer in filter(can_go_along_tree, state_layers(model)):
        own = _own_forward(layer)
        functions, missing = upstream.state_functions(own), upstream.missing_state_kernels(own)
        chunked: dict[str, Callable] = {
            name: partial(_in_small_chunks, functions[name])
            for name, package in missing.items()
            if package is not None and "chunk_size" in inspect.signature(functions[name]).parameters
        }
        changed.append((_installed(layer) or layer, "forward", with_functions(own, chunked)))
    return attributes_set(changed)


def _in_small_chunks(function: Callable, *args: object, **kwargs: object) -> object:
    return function(*args, **{**kwargs, "chunk_size": _SMALL_CHUNK})


@dataclass
class StateForward:
    """How our forward of a layer computes flat batches."""

    forward: Callable  # that the layer had
    along_tree: bool  # if not, the layer sees rows
    kernels: list[str]  # transformers' functions that it calls, and that have kernels here
    takes_boundaries: bool  # whether all of these take several rows on one axis


def install_state_layers(model: PreTrainedModel, along_tree: bool) -> None:
    """Have layers that carry state read flat layouts: `along_tree` where they can, else as rows. May be repeated."""
    for layer in state_layers(model):
        own, goes_along = _own_forward(layer), along_tree and can_go_along_tree(layer)
        if not _installed(layer):
            _bind(layer)
        kernels = [name for name, package in upstream.missing_state_kernels(own).items() if package is None]
        vars(layer)[ATTRIBUTE] = StateForward(own, goes_along, kernels, upstream.takes_state_boundaries(layer))


def _bind(layer: torch.nn.Module) -> None:
    @functools.wraps(type(layer).forward)
    @torch.compiler.disable(recursive=False)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        state: StateForward = vars(self)[ATTRIBUTE]
        mask = next(filter(is_layout, (*args, *kwargs.values())), None)
        if mask is None:
            return state.forward(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        compute = _along_tree if state.along_tree else _on_rows
        return compute(self, state, mask, args, kwargs)

    vars(forward)[ATTRIBUTE] = True
    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


class _NoCache(types.SimpleNamespace):
    """A cache of which each layer reads a state, and into which xLSTM writes none, as it is false."""

    def __bool__(self) -> bool:
        return False


def state_arguments(model: PreTrainedModel, context: PassContext) -> Inputs:
    """
    Arguments by which the layout reaches the layers of a backbone without attention, which takes no dict of masks. None
    for other backbones, even if the configuration gives all of their layers a state.
    """
    if config_value(model.config.get_text_config(), "num_attention_heads") is not None:
        return {}
    expected, mask = inspect.signature(model.base_model.forward).parameters, FlatMask.carrying(context, per_token=True)
    if "state" in expected:  # RWKV
        return {"attention_mask": None, "state": mask}
    if "attention_mask" not in expected:  # xLSTM
        cache = next(name for name in CACHES if name in expected)
        states: dict[int, FlatMask] = defaultdict(lambda: mask)  # each layer gets the layout where it expects its state
        return {"attention_mask": None, cache: _NoCache(rnn_state=states)}
    return {"attention_mask": mask}


def is_layout(value: object) -> TypeGuard[FlatMask]:
    """Whether an argument is the mask that carries the layout."""
    # Models may mask hidden states by it: the result is a [`FlatMask`], too, but of floats
    return isinstance(value, FlatMask) and value.dtype == torch.bool


@torch.compiler.disable  # the layout of each batch would be compiled into its code
def _along_tree(layer: torch.nn.Module, state: StateForward, mask: FlatMask, args: tuple, kwargs: Inputs) -> object:
    """Call a layer on flat tokens, without a mask, with functions that go along the tree."""
    functions = tree_functions(mask.context, upstream.state_functions(state.forward), state.kernels)
    without = [None if is_layout(value) else value for value in args]
    named = {name: None if is_layout(value) else value for name, value in kwargs.items()}
    return with_functions(state.forward, functions)(*without, **named)


def _on_rows(layer: torch.nn.Module, state: StateForward, mask: FlatMask, args: tuple, kwargs: Inputs) -> object:
    """
    Call a layer on the path of each segment as a row, and keep its outputs for the segments' own tokens.

    `mask` is the one among its arguments that carries the layout; of the others, everything that has an entry per token
    is cut into rows. Where its kernels take boundaries, it is called once, with all rows on one axis.
    """
    layout = mask.context.layout
    rows = PathRows.of(layout, None if state.takes_boundaries else step_cost(layout.device))

    row_boundaries = boundaries(_paths(layout)) if state.takes_boundaries else {}
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, _cut((args, kwargs), layout, rows), strict=True):
        if vars(layer).get("is_causal"):  # attention that sees rows: its mask is made of these
            states = next(filter(torch.is_tensor, (*group_args, *group_kwargs.values())))
            window = vars(layer).get("sliding_window")
            group_kwargs["attention_mask"] = causal_mask(layout, n, longest, window, states.dtype)
        outputs.append(state.forward(*group_args, **group_kwargs, **row_boundaries))
    # RWKV's blocks hand the state of their first layer to the second, which must find the layout there
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


@once_per_layout
def _paths(layout: FlatLayout) -> FlatLayout:
    """The path of each segment one after the other, as rows that share nothing."""
    unshared = Segments.from_lengths(layout.segments.key_lengths)
    return FlatLayout.from_segments(unshared).to(layout.device, non_blocking=True)


def _cut(value: object, layout: FlatLayout, rows: PathRows) -> list[Any]:
    """
    `value` for each group of rows: what has an entry per token is cut, what has one per pair of places on the axis is
    that of a row's places, and what carries the layout is left out.
    """
    number, total = len(rows.shapes), layout.segments.num_tokens
    if isinstance(value, tuple | list):
        parts = [_cut(item, layout, rows) for item in value]
        return [type(value)(part[i] for part in parts) for i in range(number)]
    if isinstance(value, dict):
        return [dict(zip(value, group, strict=True)) for group in _cut([*value.values()], layout, rows)]
    if not isinstance(value, torch.Tensor) or is_layout(value):
        return [None if is_layout(value) else value] * number
    if value.shape == (total, total):
        return [value[:longest, :longest] for _, longest in rows.shapes]
    if value.shape[:2] != (1, total):
        return [value] * number
    states = value.as_subclass(torch.Tensor).squeeze(0)
    if rows.slots is None:
        return [states[None]]
    parts = Gather.apply(states, rows.slots).split([*map(prod, rows.shapes)])
    return [part.unflatten(0, shape) for part, shape in zip(parts, rows.shapes, strict=True)]


def _join(outputs: Sequence[Any], rows: PathRows, state: Any) -> Any:
    """The flat output of a layer from those of each group of rows; `state` replaces what has no entry per token."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_join(parts, rows, state) for parts in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor) or first.shape[:2] != rows.shapes[0]:
        return state
    if rows.own is None:
        return first
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.own)[None]
