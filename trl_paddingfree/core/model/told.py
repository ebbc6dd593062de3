"""How layers are told of a flat batch, between transformers and our attention.

The configuration names our attention, by a [`StandIn`] for the model's own. In each pass, the mask is a [`FlatMask`],
which carries the layout, and what goes around attention. Backends that keep the model's own attention get a dense mask,
or boundaries, instead.

Shape legend: see [`~trl_paddingfree.core.flat.segments`].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .. import upstream
from ..flat.batch import Inputs
from ..flat.layout import Attended, FlatLayout, once_per_layout
from .architecture import config_value
from .attention import BOUNDARIES, dense_mask
from .backends import ATTENTION, ATTENTION_BACKENDS, BackendName, FlatAttention

# transformers' names in `layer_types`; hybrid layers have attention and a state
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NOT_ATTENTION = ("linear_attention", "conv")
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": _SLIDING}
# Models whose image tokens attend to one another in both directions in sliding layers only
_CAUSAL_IN_FULL = ("gemma4_text",)
# Outputs of a recurrence and, if others continue it, its states
Scanned = tuple[torch.Tensor, torch.Tensor | None]
# Weights of a recurrence; `None` where a layer has none
Weights = Sequence[torch.Tensor | None]
# A recurrence over the whole tree, called with inputs and weights. With `cuts`, `number` and `carried`, runs slice
# `number` from carried states. Returns outputs, and the states that later slices read
Scan = Callable[..., Scanned]
# The attention mask of a backbone: one for all layers, or one for each kind
Masks = torch.Tensor | dict[str, "Masks"] | None


class OtherSlices(Protocol):
    """
    How layers that carry state get what they need from other slices of the flat axis: earlier ones
    ([`~trl_paddingfree.slices.decoder.Carry`]), or those of other processes
    ([`~trl_paddingfree.groups.sequence.SequenceGroup`]). Only convolutions and scans ask: nothing else mixes tokens but
    attention.
    """

    def span(self, num_tokens: int) -> range:
        """The flat tokens of this slice, out of `num_tokens`."""

    def with_context(self, layout: FlatLayout, values: torch.Tensor, size: int) -> torch.Tensor:
        """
        Values `(t, C)` of the slice, followed by values `(O, C)` of the tokens in other slices that a convolution over
        `size + 1` tokens reads, in flat order.
        """

    def scan(self, layout: FlatLayout, scan: Scan, inputs: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor:
        """
        The outputs `(1, t, H, ...)` of a `scan` for the slice. The first of its `inputs (1, t, heads, ...)` has all `H`
        heads of the state; others may have fewer, each shared by several of these. Its `weights` are `(H, ...)`.
        """


# Goes around attention: `around(attend, layout, layer, module, query, key, value, **kwargs)` calls `attend` with these
# arguments, or with others. `module` is the `layer` that calls attention, or a copy with some of its heads
Around = Callable[..., Attended]


@dataclass(frozen=True)
class PassContext:
    """
    What a mask carries to the layers of a pass.

    Args:
        layout (`FlatLayout`):
            How the tokens that attention computes lie on the flat axis.
        around (`tuple[Around, ...]`, *optional*):
            What goes around the attention of each layer, outermost first.
        others (`OtherSlices`, *optional*):
            Where layers that carry state get what lies in other slices; `None` if there are none.
    """

    layout: FlatLayout
    around: tuple[Around, ...] = ()
    others: OtherSlices | None = None


class FlatMask(torch.Tensor):
    """
    An attention mask that carries a [`PassContext`].

    transformers passes a 4-D mask through to attention untouched, in every model and under gradient checkpointing,
    whereas some models drop other keyword arguments (StableLM, Nemotron). No dense mask is ever made.
    """

    context: PassContext

    @classmethod
    def carrying(cls, context: PassContext | FlatLayout, per_token: bool = False) -> "FlatMask":
        """A mask on the layout's device: `(1, 1, 1, 1)`, or `(1, t)` as layers that carry state expect it."""
        context = PassContext(context) if isinstance(context, FlatLayout) else context
        shape = [1, 1, 1, 1]
        if per_token:
            total = context.layout.segments.num_tokens
            shape = [1, total if context.others is None else len(context.others.span(total))]
        mask = torch.ones(shape, dtype=torch.bool, device=context.layout.cu_seqlens_q.device).as_subclass(cls)
        mask.context = context
        return mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.all, torch.Tensor.all):  # transformers drops masks that are all true, and this one must stay
            return torch.zeros((), dtype=torch.bool)
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            buffer, source = args[:2]
            if not isinstance(source, cls):  # overwritten: an ordinary tensor from now on
                vars(buffer).clear()
                buffer.__class__ = torch.Tensor
                return func(*args, **kwargs)
            if buffer.shape == source.shape:
                # PyTorch offloads what a checkpoint saves into a buffer, which becomes the mask last copied there
                buffer.__class__ = cls
                vars(buffer).update(vars(source))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            mask = next((x for x in args if isinstance(x, cls)), None)
            if mask is None or result.shape != mask.shape:
                raise RuntimeError(
                    f"the model computes with its attention mask ({func.__name__}): it needs a dense one"
                )
            context = mask.context
            result.context = replace(context, layout=context.layout.to(result.device))
        return result


@once_per_layout
def scale_of_rows(layout: FlatLayout, floor_scale: float, attn_scale: float) -> torch.Tensor:
    """`(T,)` float32: factors that turn a scale by flat position into one by position in the row."""
    places = np.stack([np.arange(layout.segments.num_tokens), layout.segments.position_ids]) + 1
    flat, row = np.log1p(places // floor_scale) * attn_scale + 1
    return layout.tensor((row / flat).astype(np.float32))


def _dispatch(attend: FlatAttention, loaded_with: str, module, query, key, value, attention_mask, **kwargs):
    """
    Attention as transformers calls it in each layer: `attend` computes flat batches, and what the model was
    `loaded_with` all other calls, which compilers and exports trace.
    """
    if isinstance(attention_mask, FlatMask):
        return _of_layout(attend, loaded_with, module, query, key, value, attention_mask, **kwargs)
    # No model makes such masks. Exports must not be bound to shapes by the question
    is_unlike = attention_mask is not None and not torch.compiler.is_exporting()
    if is_unlike and attention_mask.shape == (1, 1, 1, 1) and key.size(2) > 1:
        raise RuntimeError(
            "The mask that tells attention of a flat batch was copied on its way, and the copy lets all tokens see "
            "one another. Leave out what copies or offloads arguments of layers."
        )
    return upstream.attention_function(loaded_with, module)(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable  # it would compile the layout of each batch into the code
def _of_layout(attend: FlatAttention, loaded_with: str, module, query, key, value, mask: FlatMask, **kwargs):
    """Attention of the flat batch whose layout its `mask` carries, with what goes around it."""
    kwargs = {name: x for name, x in kwargs.items() if name not in BOUNDARIES}
    call = partial(_attend, attend, loaded_with)
    for around in reversed(mask.context.around):
        call = partial(around, call)
    return call(mask.context.layout, module, module, query, key, value, **kwargs)


def _attend(attend: FlatAttention, loaded_with: str, layout: FlatLayout, layer, module, query, key, value, **kwargs):
    """Attention of a flat batch by the backend `attend`; for what goes around it, see `Around`."""
    held = vars(module)
    # Llama 4 scales queries by position in their row; their layer has used the position on the flat axis
    if held.get("attn_temperature_tuning") and not held["use_rope"]:
        floor = held["floor_scale"]
        if max(query.size(2), layout.segments.max_seqlen_k) >= floor:
            query = (query * scale_of_rows(layout, floor, held["attn_scale"])[:, None]).to(query.dtype)
    return attend(layout, loaded_with, module, query, key, value, **kwargs)


class StandIn(str):
    """
    The name of one of our attention implementations, which runs a backend in place of the model's own implementation.

    It prints as the model's own and compares equal to it, because modeling files test for that name (`if
    config._attn_implementation in ("eager", "sdpa")`), and generation and padded rows must work as before. Its hash is
    its own, so that transformers' registries find our function. Dicts and sets therefore never find it by the name that
    it equals: GIT, which looks up its class in a dict, cannot be rebuilt from the configuration of an installed model.
    """

    key: tuple[str, BackendName]  # the implementation that it stands in for, and the backend

    def __new__(cls, loaded_with: str, backend: BackendName):
        name = super().__new__(cls, loaded_with)
        name.key = (loaded_with, backend)
        return name

    def __reduce__(self):
        return register_attention, self.key  # a pickled model may be loaded where nothing is registered

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:  # torch.compile traces this
        return self.key == other.key if isinstance(other, StandIn) else self.key[0] == other

    __ne__ = object.__ne__  # asks `__eq__`, unlike that of `str`


def register_attention(loaded_with: str, backend: BackendName) -> StandIn:
    """Register attention that runs flat batches by `backend`, other calls by `loaded_with`; returns the name to set."""
    name = StandIn(loaded_with, backend)
    AttentionInterface.register(name, partial(_dispatch, ATTENTION[backend], loaded_with))
    if loaded_with in (masks := AttentionMaskInterface()):  # else transformers makes no masks for it
        masks.register(name, masks[loaded_with])  # padded calls keep theirs
    return name


def masks_by_kind(model: PreTrainedModel, backend: BackendName, context: PassContext) -> dict[str, Masks]:
    """
    The attention masks of a backbone by transformers' names of the kinds of layers: each is a [`FlatMask`], a dense
    `(1, 1, T, T)` mask in the model's dtype, or `None`.
    """
    config = model.config.get_text_config()
    kinds = set(config_value(config, "layer_types") or ()).difference(NOT_ATTENTION)
    if not kinds:
        kinds = {_FULL if config_value(config, "sliding_window") is None else _SLIDING}
    whole = FlatMask.carrying(context)
    masks: dict[str, Masks] = {}
    for kind in sorted(kinds):
        of_attention, layout, mask = _HYBRID.get(kind, kind), context.layout, None
        if backend != "positions":
            if of_attention == _CHUNKED:
                layout = layout.chunked(config.attention_chunk_size)
            elif of_attention == _FULL and config.model_type in _CAUSAL_IN_FULL:
                layout = layout.without_blocks()
            if backend not in ATTENTION_BACKENDS:
                mask = dense_mask(layout, config.sliding_window if of_attention == _SLIDING else None, model.dtype)
            else:  # attention functions get their window as an argument
                mask = whole if layout is context.layout else FlatMask.carrying(replace(context, layout=layout))
        masks |= dict.fromkeys((kind, of_attention), mask)
    return masks


def attention_arguments(model: PreTrainedModel, backend: BackendName, context: PassContext) -> Inputs:
    """The arguments of a backbone that carry the layout to its attention: one mask, or one for each kind of layer."""
    masks = masks_by_kind(model, backend, context)
    is_one = len(set(map(id, masks.values()))) == 1
    return {"attention_mask": next(iter(masks.values())) if is_one else masks}
