"""Layers that carry state from token to token (recurrences, short convolutions), in models that are otherwise flat.

Most of them go along the tree: they run flat, and every branch continues from the state at its fork, see `state_tree`.
The others see rows: the whole path of each segment as one row, which starts from a zero state. Only the outputs of the
segment's own tokens are kept, so these layers compute a prefix once for each segment that continues it. The layout
arrives in the argument in which the layer expects a mask, or its state.
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

from ..core.flat.batch import Inputs
from ..core.flat.layout import FlatLayout, Gather, once_per_layout
from ..core.flat.segments import Segments
from ..core.model.architecture import CACHES, config_value, decoder_of
from ..core.model.attention import BOUNDARIES, boundaries, shared_mask
from ..core.model.restored import attributes_set, mark_of
from ..core.model.told import FlatMask, PassContext
from . import kernels
from .pieces import PathRows
from .tree import step_cost, tree_functions, with_functions

# Where a layer keeps its [`StateForward`], which is copied with the layer
ATTRIBUTE = "flat_state"

# Children and buffers that identify layers which carry state without a convolution module: RWKV's token shift, xLSTM's
# recurrence, MiniMax's decay, DeepSeek V4's compressed keys; and the attention of Inkling and Inkling 2, which measures
# distances between tokens along its input
_MARKS = {"time_shift", "mlstm_backend", "slope_rate", "compressor", "rel_logits_proj", "relative_position_bias"}
# Tokens of a small chunk: fewer than most pieces have
_SMALL_CHUNK = 8

# Where layers keep the number of heads of their state: delta rules, and all others
_STATE_HEADS = ("num_v_heads", "num_heads")


def is_state_layer(module: torch.nn.Module) -> bool:
    """Whether `module` has a short convolution, which precedes every recurrence that has kernels."""
    # PEFT wraps a convolution that it adapts
    return any(isinstance(getattr(child, "base_layer", child), torch.nn.Conv1d) for child in module.children())


def state_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The outermost layers of `model` that carry state from token to token."""
    # Without the audio encoder beside the layers (Phi-4 multimodal), which has convolutions, too
    stacks = [child for child in decoder_of(model).children() if isinstance(child, torch.nn.ModuleList)]
    return [*dict.fromkeys(layer for stack in stacks for layer in _outermost(stack))]


def _outermost(module: torch.nn.Module) -> list[torch.nn.Module]:
    named = (*module.named_children(), *module.named_buffers(recurse=False))
    if is_state_layer(module) or not _MARKS.isdisjoint(dict(named)):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


def missing_kernels(model: PreTrainedModel) -> list[str]:
    """Packages whose kernels would compute these layers' rows or pieces in one call, sorted."""
    forwards = map(_own_forward, state_layers(model))
    return sorted({package for own in forwards for package in kernels.missing_kernels(own).values() if package})


def _own_forward(layer: torch.nn.Module) -> Callable:
    """A layer's own forward, without ours."""
    return (_installed(layer) or layer).forward


def _installed(layer: torch.nn.Module) -> "StateForward | None":
    """The [`StateForward`] of a layer, if its forward is still ours or wraps ours: others may have replaced it."""
    return vars(layer)[ATTRIBUTE] if mark_of(layer, ATTRIBUTE) else None


def can_go_along_tree(layer: torch.nn.Module) -> bool:
    """Whether a layer mixes tokens by functions that those of `state_tree` can replace."""
    forward = _own_forward(layer)
    if not is_state_layer(layer) or not kernels.functions_of(forward):
        return False
    with suppress(TypeError):
        with_functions(forward, {})
        return True
    return False


def state_heads(model: PreTrainedModel) -> int | None:
    """The fewest heads of any layer's state; `None` if none has heads (only channels, or no state)."""
    parts = [vars(part) for layer in state_layers(model) for part in layer.modules()]
    return min((held[name] for held in parts for name in _STATE_HEADS if isinstance(held.get(name), int)), default=None)


def repeats_prefixes(model: PreTrainedModel) -> bool:
    """Whether any layer of `model`, as installed, sees rows, and so computes shared prefixes repeatedly."""
    return not all(map(_is_along_tree, state_layers(model)))


def _is_along_tree(layer: torch.nn.Module) -> bool:
    state = _installed(layer)
    return can_go_along_tree(layer) if state is None else state.along_tree


def describe_state_layers(model: PreTrainedModel) -> str:
    """How the layers of `model` that carry state are computed, and what would be faster; empty if it has none."""
    kinds = defaultdict(set)
    for layer in state_layers(model):
        how = "along the tree, each token once"
        if not _is_along_tree(layer):
            joined = kernels.takes_boundaries(layer)
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
    of a tree may: the same results up to rounding.
    """
    changed = []
    for layer in filter(can_go_along_tree, state_layers(model)):
        own = _own_forward(layer)
        functions, missing = kernels.functions_of(own), kernels.missing_kernels(own)
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

    forward: Callable  # the layer's own
    along_tree: bool  # if not, the layer sees rows
    kernels: list[str]  # transformers' functions that it calls, if kernels for them are installed
    takes_boundaries: bool  # whether all of these take several rows on one axis


def install_state_layers(model: PreTrainedModel, along_tree: bool) -> None:
    """Make layers that carry state read flat layouts: `along_tree` if they can, else as rows. May be called again."""
    for layer in state_layers(model):
        own, goes_along = _own_forward(layer), along_tree and can_go_along_tree(layer)
        if not _installed(layer):
            _bind(layer)
        with_kernel = [name for name, package in kernels.missing_kernels(own).items() if package is None]
        vars(layer)[ATTRIBUTE] = StateForward(own, goes_along, with_kernel, kernels.takes_boundaries(layer))


def bind_again(model: PreTrainedModel) -> None:
    """
    Bind our forward where a layer has got its own back: with `use_kernels=True`, transformers puts it back at each
    change between training and evaluation mode, if the hub has no kernel for the layer.
    """
    for layer in state_layers(model):
        if ATTRIBUTE in vars(layer) and kernels.has_own_forward(layer):
            _bind(layer)


def _bind(layer: torch.nn.Module) -> None:
    @functools.wraps(type(layer).forward)
    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        state: StateForward = vars(self)[ATTRIBUTE]
        for value in (*args, *kwargs.values()):  # compilers and exports trace calls without a layout
            if is_layout(value):
                return _of_layout(self, state, value, args, kwargs)
        return state.forward(*args, **kwargs)

    vars(forward)[ATTRIBUTE] = True
    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


@torch.compiler.disable(recursive=False)
def _of_layout(layer: torch.nn.Module, state: StateForward, mask: FlatMask, args: tuple, kwargs: Inputs) -> object:
    """Call a layer on the flat tokens whose layout `mask` carries."""
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    compute = _along_tree if state.along_tree else _on_rows
    return compute(layer, state, mask, args, kwargs)


class _NoCache(types.SimpleNamespace):
    """A cache from which each layer reads a state. It is falsy, so xLSTM writes none into it."""

    def __bool__(self) -> bool:
        return False


def state_arguments(model: PreTrainedModel, context: PassContext) -> Inputs:
    """
    Arguments that carry the layout to the layers of a backbone without attention, which takes no dict of masks. Empty
    for other backbones, even if the configuration gives all of their layers a state.
    """
    if config_value(model.config.get_text_config(), "num_attention_heads") is not None:
        return {}
    expected, mask = inspect.signature(model.base_model.forward).parameters, FlatMask.carrying(context, per_token=True)
    if "state" in expected:  # RWKV
        return {"attention_mask": None, "state": mask}
    if "attention_mask" not in expected:  # xLSTM
        cache = next(name for name in CACHES if name in expected)
        # Each layer gets the layout where it expects its state
        return {"attention_mask": None, cache: _NoCache(rnn_state=defaultdict(lambda: mask))}
    return {"attention_mask": mask}


def is_layout(value: object) -> TypeGuard[FlatMask]:
    """Whether an argument is the mask that carries the layout."""
    # Models may mask hidden states by it: the result is a [`FlatMask`], too, but a float one
    return isinstance(value, FlatMask) and value.dtype == torch.bool


@torch.compiler.disable  # it would compile the layout of each batch into the code
def _along_tree(layer: torch.nn.Module, state: StateForward, mask: FlatMask, args: tuple, kwargs: Inputs) -> object:
    """Call a layer on flat tokens, without a mask, with functions that go along the tree."""
    from accelerate.utils import recursively_apply  # other models are computed without accelerate

    functions = tree_functions(mask.context, kernels.functions_of(state.forward), state.kernels)
    args, kwargs = recursively_apply(lambda mask: None, (args, kwargs), test_type=is_layout)
    return with_functions(state.forward, functions)(*args, **kwargs)


def _on_rows(layer: torch.nn.Module, state: StateForward, mask: FlatMask, args: tuple, kwargs: Inputs) -> object:
    """
    Call a layer on the path of each segment as a row, and keep its outputs for the segments' own tokens.

    `mask` is the argument that carries the layout; other arguments that have an entry per token are cut into rows. If
    the layer's kernels take boundaries, it is called once, with all rows on one axis.
    """
    layout = mask.context.layout
    rows = PathRows.of(layout, None if state.takes_boundaries else step_cost(layout.device))

    row_boundaries = boundaries(_paths(layout)) if state.takes_boundaries else {}
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, _cut((args, kwargs), layout, rows), strict=True):
        if vars(layer).get("is_causal"):  # attention that sees rows needs a mask of these
            states = next(filter(torch.is_tensor, (*group_args, *group_kwargs.values())))
            window = vars(layer).get("sliding_window")
            # Expanded, because DeepSeek V4 concatenates it with a mask of compressed keys that differs from row to row
            mask_of_rows = shared_mask(layout, ((0, longest),), window, states.dtype)
            group_kwargs["attention_mask"] = mask_of_rows.expand(n, 1, longest, longest)
        outputs.append(state.forward(*group_args, **group_kwargs, **row_boundaries))
    # RWKV's blocks pass the state of their first layer to the second, which must find the layout there
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


@once_per_layout
def _paths(layout: FlatLayout) -> FlatLayout:
    """The paths of all segments, one after another, as rows that share nothing."""
    unshared = Segments.from_lengths(layout.segments.key_lengths)
    return FlatLayout.from_segments(unshared).to(layout.device, non_blocking=True)


def _cut(value: object, layout: FlatLayout, rows: PathRows) -> list[Any]:
    """
    `value` for each group of rows: tensors with an entry per token are cut into rows, `(T, T)` ones are cropped to the
    places of a row, and the layout becomes `None`.
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
    """A layer's flat output from those of each group of rows; `state` replaces outputs without an entry per token."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_join(parts, rows, state) for parts in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor) or any(x.shape[:2] != y for x, y in zip(outputs, rows.shapes, strict=True)):
        return state
    if rows.own is None:
        return first
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.own)[None]
