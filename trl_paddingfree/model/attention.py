"""Attention over segments: one signature, several kernels, and their registration with transformers.

Shape legend: see [`~trl_paddingfree.flat.segments`]; in addition
    B = 1, H = query heads, K = key/value heads, D = head size
Every function computes, for each segment, causal attention of the segment's queries over the keys on its path, aligned
to the bottom right: the last query sees the last key.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from operator import mul

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from .. import upstream
from ..flat.batch import Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import Attention, FlatLayout, Gather, GatherIndex, once_per_layout
from .masks import BOUNDARIES, BackendName, FlatMask, boundaries, segment_mask

# Of CUDA devices that PyTorch's flash attention is compiled for: Ampere's
_LEAST_CAPABILITY = (8, 0)


def _gathered(states: torch.Tensor, rows: GatherIndex | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`(1, heads, T, D)` states as `(S, heads, D)`: copies of `rows`, or all. Cast first: fewer bytes to gather."""
    # `states[0]` would write its gradient into a zeroed copy of all states, a full pass over memory
    states = states.transpose(1, 2).squeeze(0).to(dtype or states.dtype)
    return states if rows is None else Gather.apply(states, rows)


def _flat_states(query, key, value, layout: FlatLayout, dtype: torch.dtype | None):
    """What varlen kernels read: queries of all tokens, and keys and values of the path of each segment."""
    query, key, value = _gathered(query, None, dtype), *(_gathered(x, layout.kv_gather, dtype) for x in (key, value))
    if value.size(-1) != query.size(-1):  # MLA: the kernels want values as wide as queries
        value = pad(value, [0, query.size(-1) - value.size(-1)])
    return query, key, value


def segment_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The model's own attention function, in [`AttentionCalls`] of like segments: exact on every device and dtype."""
    # Eager functions have no public name
    attend = upstream.attention_function(previous, module) if previous == "eager" else AttentionInterface()[previous]
    window, calls = kwargs.pop("sliding_window", None), AttentionCalls.of(layout)
    outputs = []
    query, key, value = _gathered(query, calls.query_rows), *(_gathered(x, calls.key_rows) for x in (key, value))
    numbers = list(map(len, calls.segments))
    lengths, key_lengths = (list(map(mul, numbers, longest)) for longest in (calls.queries, calls.keys))
    # The gradient of a split is one concatenation; that of each slice is as long as the flat axis
    states = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    for segments, number, parts in zip(calls.segments, numbers, states, strict=True):
        # Eager functions add their mask to the scores
        mask = segment_mask(layout, segments, window, query.dtype if previous == "eager" else None)
        q, k, v = (x.unflatten(0, (number, -1)).transpose(1, 2) for x in parts)
        if previous == "eager":  # `matmul` copies those of several segments: of a view, all would be kept beside
            q = q.contiguous()
        outputs.append(attend(module, q, k, v, mask, **kwargs)[0].flatten(0, 1))
    output = torch.cat(outputs)
    return (output if calls.answers is None else Gather.apply(output, calls.answers))[None], None


def flash_attention(layout: FlatLayout, previous: str, module, query, key, value, scaling=None, **kwargs):
    """transformers' own flash attention call, for flash-attn 2/3/4 and hub kernels, with our boundaries."""
    dtype = upstream.flash_target_dtype(query, module)
    q, k, v = (states[None] for states in _flat_states(query, key, value, layout, dtype))
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = kwargs["s_aux"].to(q.dtype)
    kwargs |= {name: value for name, value in boundaries(layout).items() if name != "seq_idx"}
    kwargs |= {"is_causal": True, "softmax_scale": scaling, "attn_implementation": previous}
    output = upstream.flash_attention_forward(q, k, v, attention_mask=None, query_length=q.size(1), **kwargs)
    return output[..., : value.size(-1)], None


@cache
def torch_varlen() -> Callable:
    """`torch.nn.attention.varlen.varlen_attn` as `(q, k, v, cu_q, cu_k, max_q, max_k, scale, window)`."""
    from torch.nn.attention.varlen import varlen_attn

    # With fewer key heads than query heads, releases that have this flag need it; others need nothing
    parameters = inspect.signature(varlen_attn).parameters
    gqa: Inputs = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    flags = torch.backends.cuda

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window):
        left, allows_cudnn = -1 if window is None else window - 1, flags.cudnn_sdp_enabled()
        flags.enable_cudnn_sdp(False)  # it makes a plan for each shape of a batch, and keeps them all
        try:
            return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(left, 0), **gqa)
        finally:
            flags.enable_cudnn_sdp(allows_cudnn)

    return attend


@cache
def why_no_varlen(device: torch.device) -> str:
    """Why a device cannot run PyTorch's varlen kernel; empty if it can. Nothing else decides it: tests replace this."""
    if device.type != "cuda":
        return f"the model is on {device.type}, the kernel needs CUDA"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _LEAST_CAPABILITY
    if capability >= _LEAST_CAPABILITY:
        return ""
    return f"the GPU has compute capability {'.'.join(map(str, capability))}, the kernel needs 8.0 (Ampere) or more"


def sdpa_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype in which SDPA would compute: autocast casts what SDPA gets, but nothing for the varlen kernel."""
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else query.dtype


def takes_varlen(query: torch.Tensor, kwargs: Inputs) -> bool:
    """Whether PyTorch's varlen kernel can take this call."""
    return (
        not why_no_varlen(query.device)
        and sdpa_dtype(query) in (torch.float16, torch.bfloat16)
        and query.size(-1) % 8 == 0
        and query.size(-1) <= 256
        and all(kwargs.get(name) is None for name in ("softcap", "s_aux", "position_bias"))
        and not kwargs.get("dropout")
    )


def varlen_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The flash attention kernel that ships in PyTorch. Calls that it cannot take go to [`segment_attention`]."""
    if not takes_varlen(query, kwargs) or layout.blocks is not None:  # the kernel is causal, image blocks are not
        return segment_attention(layout, previous, module, query, key, value, **kwargs)
    states = _flat_states(query, key, value, layout, sdpa_dtype(query))
    lengths = (layout.cu_seqlens_q, layout.cu_seqlens_k, layout.segments.max_seqlen_q, layout.segments.max_seqlen_k)
    output = torch_varlen()(*states, *lengths, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return output[None, ..., : value.size(-1)], None


ATTENTION: dict[BackendName, Attention] = {
    "flash": flash_attention,
    "varlen": varlen_attention,
    "segment": segment_attention,
}


def _scaled_gathered(query: torch.Tensor, module: torch.nn.Module, layout: FlatLayout) -> torch.Tensor:
    """Queries scaled by position in their own row (Llama 4), where their layer took the position on the flat axis."""
    held = vars(module)
    if held["use_rope"] or max(query.size(2), layout.segments.max_seqlen_k) < held["floor_scale"]:
        return query
    return (query * scale_of_rows(layout, held["floor_scale"], held["attn_scale"])[:, None]).to(query.dtype)


@once_per_layout
def scale_of_rows(layout: FlatLayout, floor_scale: float, attn_scale: float) -> torch.Tensor:
    """`(T,)` float32: the factor from a scale by position on the flat axis to one by position in the row."""
    places = np.stack([np.arange(layout.segments.num_tokens), layout.segments.position_ids]) + 1
    flat, row = np.log1p(places // floor_scale) * attn_scale + 1
    return layout.tensor((row / flat).astype(np.float32))


@torch.compiler.disable
def _dispatch(attend: Attention, previous: str, module, query, key, value, attention_mask, **kwargs):
    if isinstance(attention_mask, FlatMask):
        context = attention_mask.context
        kwargs = {name: x for name, x in kwargs.items() if name not in BOUNDARIES}
        if vars(module).get("attn_temperature_tuning"):  # Llama 4
            query = _scaled_gathered(query, module, context.layout)
        call = partial(attend, context.layout, previous)
        for elsewhere in (context.watch, context.carry, context.group):  # the first next to the backend
            if elsewhere is not None:
                call = partial(elsewhere.attend, call, context, module)
        return call(module, query, key, value, **kwargs)
    if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1) and key.size(2) > 1:  # no model makes these
        raise RuntimeError(
            "The mask that tells attention of a flat batch was copied on its way, and is now one like any other, under "
            "which all tokens see one another. Leave out what copies or offloads arguments of layers."
        )
    return upstream.attention_function(previous, module)(module, query, key, value, attention_mask, **kwargs)


class StandIn(str):
    """
    The name of an attention implementation of ours, which computes with a backend and stands in for another one.

    It reads and compares as the name of the other: modeling files ask for that (`if config._attn_implementation in
    ("eager", "sdpa")`), and generation and padded rows must go on as before. It hashes as a name of its own, by which
    transformers' registries find ours. So a dict or a set finds it by that only, never by the name that it equals: GIT,
    which looks its class up in a dict, cannot be built anew from the configuration of an installed model.
    """

    key: tuple[str, BackendName]  # the implementation that it stands in for, and the backend

    def __new__(cls, previous: str, backend: BackendName):
        name = super().__new__(cls, previous)
        name.key = (previous, backend)
        return name

    def __reduce__(self):
        return register_attention, self.key  # a model that was saved whole is loaded where nothing is registered

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:  # torch.compile traces this
        return self.key == other.key if isinstance(other, StandIn) else self.key[0] == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def register_attention(previous: str, backend: BackendName) -> StandIn:
    """Register attention that computes flat batches by `backend`, other calls by `previous`; gives the name to set."""
    name = StandIn(previous, backend)
    AttentionInterface.register(name, partial(_dispatch, ATTENTION[backend], previous))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[previous])  # padded calls keep their masks
    return name
