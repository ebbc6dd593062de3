"""Layers that hand something on from token to token: they see rows, while all else stays flat and shared.

For each segment such a layer is given its input along the segment's whole path, as one row that starts from nothing,
and the outputs of the segment's own tokens are kept. A prefix that several segments continue is computed once for each,
in these layers only. The layout comes in the argument in which the layer expects a mask, or its state.
"""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.layout import FlatLayout
from ..flat.path_rows import PathRows
from .attention import GatherRows
from .masks import BOUNDARIES, FlatMask, causal_mask

# Names of children and buffers by which layers are known that mix tokens and have no convolution module: RWKV's shift
# by one token, xLSTM's recurrence, MiniMax's decay, DeepSeek V4's compressed keys. Inkling's attention counts the
# distance of tokens along its input
_MARKS = {"time_shift", "mlstm_backend", "slope_rate", "compressor", "rel_logits_proj"}
# What a step along a row costs in plain PyTorch, however many rows take it, in rows. CPUs of real models are busy with
# one row (measured: 0 to 1); GPUs are not with dozens, and wait for the host to launch small kernels
_STEP_COST, _STEP_COST_OF_GPUS = 1.0, 64.0


def sees_rows(module: torch.nn.Module) -> bool:
    """Whether `module` has to be given rows: it hands something on from token to token, beside attention."""
    if is_state_layer(module):
        return True
    parts = {name for named in (module.named_children(), module.named_buffers(recurse=False)) for name, _ in named}
    return bool(parts & _MARKS)


def is_state_layer(module: torch.nn.Module) -> bool:
    """Whether `module` has a short convolution, which goes before every recurrence that has kernels."""
    # PEFT puts a layer of its own around a convolution that it adapts
    children = [getattr(child, "base_layer", child) for child in module.children()]
    return any(isinstance(child, torch.nn.Conv1d) for child in children)


def state_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of `model` that have to be given rows, without those inside of others."""
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    # An encoder of sound beside the layers (Phi-4 multimodal) has convolutions too
    stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
    for module in (module for stack in stacks for module in stack.modules()):
        if module not in inside and sees_rows(module):
            found.append(module)
            inside.update(module.modules())
    return found


def carries_state(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` hands something on from token to token, beside attention."""
    return bool(state_layers(model))


def missing_kernels(model: PreTrainedModel) -> list[str]:
    """Packages whose kernels would compute the rows of these layers in one call, sorted."""
    return sorted({package for layer in state_layers(model) for package in upstream.missing_state_kernels(layer)})


def describe_state_layers(model: PreTrainedModel) -> str:
    """How the layers of `model` that carry state are computed, and what would be faster; empty if it has none."""
    layers = state_layers(model)
    if not layers:
        return ""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    if all(map(upstream.takes_state_boundaries, layers)):
        return f"Layers that carry state ({kinds}): all rows in one call of their kernels."
    packages = missing_kernels(model)
    faster = f" `pip install {' '.join(packages)}` (on GPUs) for faster kernels." if packages else ""
    return f"Layers that carry state ({kinds}): rows of like length in one call.{faster}"


@dataclass
class RowsForward:
    """
    What the forward of a layer knows of rows.

    Args:
        previous (`Callable`, *optional*):
            The forward that the instance had; `None` if it had that of its class.
        takes_boundaries (`bool`):
            Whether its kernels keep the rows of one long axis apart.
    """

    previous: Callable[..., Any] | None
    takes_boundaries: bool


def install_state_layers(model: PreTrainedModel) -> None:
    """Have the layers of `model` that carry state see rows, wherever a flat layout comes in. May be called again."""
    for layer in state_layers(model):
        takes_boundaries = upstream.takes_state_boundaries(layer)
        if (rows := getattr(layer.forward, "rows", None)) is not None:
            rows.takes_boundaries = takes_boundaries
        else:
            _install(layer, RowsForward(vars(layer).get("forward"), takes_boundaries))


def _install(layer: torch.nn.Module, rows: RowsForward) -> None:
    @functools.wraps(type(layer).forward)
    @torch.compiler.disable(recursive=False)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = rebound(rows.previous, self) if rows.previous else types.MethodType(type(self).forward, self)
        mask = next(filter(_is_layout, (*args, *kwargs.values())), None)
        if mask is None:
            return call(*args, **kwargs)
        return on_rows(self, call, mask, rows.takes_boundaries, args, kwargs)

    forward.rows = rows  # type: ignore[attr-defined]
    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


def rebound(method: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """`method` as that of `module`, where it was another's: a copy of a module computes with its own weights."""
    return types.MethodType(method.__func__, module) if isinstance(method, types.MethodType) else method


class _NoCache:
    """A cache that holds nothing but the mask that carries the layout, in place of every layer's state."""

    def __init__(self, mask: FlatMask):
        self.rnn_state = _Everywhere(mask)

    def __bool__(self) -> bool:
        return False


class _Everywhere(dict):
    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def __missing__(self, key: Any) -> Any:
        return self.value


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


def _is_layout(value: Any) -> bool:
    # A model may put its tokens where its mask says, which gives tokens that carry the layout too
    return isinstance(value, FlatMask) and value.dtype == torch.bool


def on_rows(
    layer: torch.nn.Module,
    call: Callable[..., Any],
    mask: FlatMask,
    takes_boundaries: bool,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """
    Call a layer on the path of each segment, and keep what it says of the segments' own tokens.

    Args:
        layer (`torch.nn.Module`):
            The layer.
        call (`Callable`):
            Its forward.
        mask (`FlatMask`):
            The one among its arguments that carries the layout.
        takes_boundaries (`bool`):
            Whether to call it once, on one long axis, and tell it of boundaries.
        args (`tuple`), kwargs (`dict`):
            Its arguments, of which everything that has an entry per token is cut into rows.
    """
    layout = mask.flat_layout
    rows = PathRows.joined(layout) if takes_boundaries else _rows_of(layout)
    told = key_boundaries(layout) if takes_boundaries else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    cut = _cut((args, kwargs), layout, rows)
    outputs = []
    for (n, longest), (group_args, group_kwargs) in zip(rows.shapes, cut, strict=True):
        if getattr(layer, "is_causal", False):  # attention, whose own mask would not know of rows
            window = getattr(layer, "sliding_window", None)
            dtype = next(layer.parameters()).dtype
            group_kwargs["attention_mask"] = causal_mask(layout, n, longest, window, dtype)
        outputs.append(call(*group_args, **group_kwargs, **told))
    # RWKV's blocks give their second layer the state that the first gives back
    return _join(outputs, rows, mask if kwargs.get("state") is mask else None)


def slots_of_state_layers(model: PreTrainedModel, layout: FlatLayout) -> int:
    """Tokens that the layers of `model` which carry state compute of a layout, with the padding of their rows."""
    layers = state_layers(model)
    if not layers:
        return 0
    joined = all(map(upstream.takes_state_boundaries, layers))
    rows = PathRows.joined(layout) if joined else _rows_of(layout)
    return sum(n * longest for n, longest in rows.shapes)


def _rows_of(layout: FlatLayout) -> PathRows:
    return PathRows.of(layout, _STEP_COST if layout.device.type == "cpu" else _STEP_COST_OF_GPUS)


def key_boundaries(layout: FlatLayout) -> dict[str, Any]:
    """The boundaries of the keys of each segment, as transformers' own arguments: paths one after the other."""

    def make() -> dict[str, Any]:
        numbers = np.repeat(np.arange(len(layout.segments.lengths), dtype=np.int32), layout.segments.key_lengths)
        seq_idx = layout.tensor(numbers)[None]
        longest = layout.segments.max_seqlen_k
        values = (layout.cu_seqlens_k, layout.cu_seqlens_k, longest, longest, seq_idx)
        return dict(zip(BOUNDARIES, values, strict=True))

    return layout.derived("key boundaries", make)


def _cut(value: Any, layout: FlatLayout, rows: PathRows) -> list[Any]:
    """`value` for each group of rows: what has an entry per token is cut, what carries the layout is left out."""
    if isinstance(value, tuple | list):
        parts = [_cut(item, layout, rows) for item in value]
        return [type(value)(group) for group in zip(*parts, strict=True)] if parts else [value] * len(rows.shapes)
    if isinstance(value, dict):
        parts = [_cut(item, layout, rows) for item in value.values()]
        groups = zip(*parts, strict=True) if parts else [()] * len(rows.shapes)
        return [dict(zip(value, group, strict=True)) for group in groups]
    if _is_layout(value):
        return [None] * len(rows.shapes)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, layout.segments.num_tokens):
        return [value] * len(rows.shapes)
    keys = value.as_subclass(torch.Tensor).squeeze(0)
    if layout.kv_rows is not None:
        floating = keys.is_floating_point()
        keys = GatherRows.apply(keys, layout.kv_rows) if floating else keys.index_select(0, layout.kv_rows.index)
    if rows.slots is None:
        return [keys[None]]
    slots = torch.cat([keys, keys.new_zeros(1, *keys.shape[1:])]).index_select(0, rows.slots)
    sizes = [n * longest for n, longest in rows.shapes]
    return [part.unflatten(0, shape) for part, shape in zip(slots.split(sizes), rows.shapes, strict=True)]


def _join(outputs: list[Any], rows: PathRows, state: Any) -> Any:
    """What a layer says of each token, flat, from what it says of each group of rows; `state` stands for the rest."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(parts), rows, state) for parts in zip(*outputs, strict=True))
    if not isinstance(outputs[0], torch.Tensor) or outputs[0].shape[:2] != rows.shapes[0]:
        return state
    if rows.own is None:
        return outputs[0]
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.own)[None]
