"""Attention over segments: one signature, several kernels, and their registration with transformers.

Shape legend: see [`~trl_paddingfree.core.flat.segments`]; in addition
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
from transformers.integrations.flash_attention import get_target_dtype

from .. import upstream
from ..flat.batch import Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import Attention, FlatLayout, Gather, GatherIndex, gathered, once_per_layout
from .masks import BOUNDARIES, BackendName, FlatMask, boundaries, masks_of_calls

# The lowest CUDA compute capability that PyTorch's flash attention is compiled for: Ampere
_LEAST_CAPABILITY = (8, 0)


def _flat_states(query, key, value, dtype: torch.dtype | None, rows: GatherIndex | None = None):
    """Inputs of a varlen kernel: queries of all tokens, and keys and values gathered by `rows`."""
    query, key, value = gathered(query, None, dtype), *(gathered(x, rows, dtype) for x in (key, value))
    if value.size(-1) != query.size(-1):  # MLA: the kernels want values as wide as queries
        value = pad(value, [0, query.size(-1) - value.size(-1)])
    return query, key, value


def segment_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The model's own attention, by groups of like segments ([`AttentionCalls`]): exact on every device and dtype."""
    # Eager functions have no public name
    attend = upstream.attention_function(previous, module) if previous == "eager" else AttentionInterface()[previous]
    # Functions of the user's own, even under transformers' names, may place queries by the number of keys
    pads = getattr(attend, "__globals__", {}).get("__name__", "").startswith("transformers.")
    calls = AttentionCalls.of(layout, pads)
    # Eager functions add their mask to the scores
    dtype = query.dtype if previous == "eager" else None
    masks = masks_of_calls(layout, kwargs.pop("sliding_window", None), dtype, pads)
    outputs = []
    query, key, value = gathered(query, calls.query_rows), *(gathered(x, calls.key_rows) for x in (key, value))
    numbers = list(map(len, calls.segments))
    lengths, key_lengths = (list(map(mul, numbers, longest)) for longest in (calls.queries, calls.keys))
    # The backward pass of `split` is one concatenation; each slice would get a gradient as long as the flat axis
    states = query.split(lengths), key.split(key_lengths), value.split(key_lengths)
    for mask, number, *parts in zip(masks, numbers, *states, strict=True):
        q, k, v = (x.unflatten(0, (number, -1)).transpose(1, 2) for x in parts)
        if previous == "eager":  # `matmul` copies several segments, and a view would keep all queries too
            q = q.contiguous()
        outputs.append(attend(module, q, k, v, mask, **kwargs)[0].flatten(0, 1))
    output = torch.cat(outputs)
    return (output if calls.answers is None else Gather.apply(output, calls.answers))[None], None


def flash_attention(layout: FlatLayout, previous: str, module, query, key, value, scaling=None, **kwargs):
    """transformers' own flash attention call, for flash-attn 2/3/4 and hub kernels, with our boundaries."""
    dtype = get_target_dtype(query, module)  # transformers casts float32 queries: PEFT keeps norms in float32
    q, k, v = (states[None] for states in _flat_states(query, key, value, dtype, layout.kv_gather))
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = kwargs["s_aux"].to(q.dtype)
    kwargs |= {**boundaries(layout), "is_causal": True, "softmax_scale": scaling, "attn_implementation": previous}
    output = upstream.flash_attention_forward(q, k, v, attention_mask=None, query_length=q.size(1), **kwargs)
    return output[..., : value.size(-1)], None


@cache
def torch_varlen() -> Callable:
    """
    `torch.nn.attention.varlen.varlen_attn`, called with `(q, k, v, cu_q, cu_k, max_q, max_k, scale, window)`. Returns
    the output and the log-sum-exp of the scores.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # Releases that have this flag need it if there are fewer key heads than query heads; others need nothing
    parameters = inspect.signature(varlen_attn).parameters
    options: Inputs = {"return_aux": AuxRequest(lse=True), **dict.fromkeys({"enable_gqa"} & {*parameters}, True)}
    flags = torch.backends.cuda

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, scale, window):
        left, allows_cudnn = -1 if window is None else window - 1, flags.cudnn_sdp_enabled()
        flags.enable_cudnn_sdp(False)  # it would build and cache a plan for every batch shape
        try:
            lengths, window_size = (cu_q, cu_k, max_q, max_k), (left, 0)
            return varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, **options)
        finally:
            flags.enable_cudnn_sdp(allows_cudnn)

    return attend


@torch.library.custom_op("trl_paddingfree::flash_attn_on_paths", mutates_args=())
def _on_paths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    index: torch.Tensor | None, order: torch.Tensor | None, offsets: torch.Tensor | None,
    cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, scale: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """
    [`torch_varlen`] with `(T, heads, D)` keys and values, gathered by the [`GatherIndex`] of these tensors, if given.
    The backward pass gathers them again, so only the originals are saved. TRL's selective checkpointing recognizes
    this operator by its name and saves its results.
    """
    keys, values = (x if index is None else x.index_select(0, index) for x in (key, value))
    return torch_varlen()(query, keys, values, cu_q, cu_k, max_q, max_k, scale, window)


def _keep(ctx, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    # All layers share these tensors, so they are kept out of the saved ones, which are offloaded and counted
    ctx.rows, ctx.options = None if inputs[3] is None else GatherIndex(*inputs[3:6]), inputs[6:]


def _gradients(ctx, grad: torch.Tensor, _) -> tuple[torch.Tensor | None, ...]:
    query, key, value, output, lse = ctx.saved_tensors
    if ctx.rows is not None:
        key, value = (x.index_select(0, ctx.rows.index) for x in (key, value))
    of_query, *gradients = upstream.varlen_gradients(grad, query, key, value, output, lse, *ctx.options)
    if ctx.rows is not None:
        gradients = [Gather.backward(ctx, x)[0] for x in gradients]
    return of_query, *gradients, *[None] * (3 + len(ctx.options))


_on_paths.register_autograd(_gradients, setup_context=_keep)


@cache
def why_no_varlen(device: torch.device) -> str:
    """Why a device cannot run PyTorch's varlen kernel; empty if it can. The one place that decides: tests patch it."""
    if device.type != "cuda":
        return f"the model is on {device.type}, the kernel needs CUDA"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _LEAST_CAPABILITY
    if capability >= _LEAST_CAPABILITY:
        return ""
    return f"the GPU has compute capability {'.'.join(map(str, capability))}, the kernel needs 8.0 (Ampere) or more"


def sdpa_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype in which SDPA would compute: autocast casts the inputs of SDPA, but not of the varlen kernel."""
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else query.dtype


def takes_varlen(query: torch.Tensor, kwargs: Inputs) -> bool:
    """Whether PyTorch's varlen kernel supports this call."""
    return (
        not why_no_varlen(query.device)
        and sdpa_dtype(query) in (torch.float16, torch.bfloat16)
        and query.size(-1) in range(8, 257, 8)
        and all(kwargs.get(name) is None for name in ("softcap", "s_aux", "position_bias"))
        and not kwargs.get("dropout")
    )


def varlen_attention(layout: FlatLayout, previous: str, module, query, key, value, **kwargs):
    """The flash attention kernel that ships in PyTorch. Unsupported calls go to [`segment_attention`]."""
    if not takes_varlen(query, kwargs) or layout.blocks is not None:  # the kernel is causal, image blocks are not
        return segment_attention(layout, previous, module, query, key, value, **kwargs)
    rows, states = layout.kv_gather, _flat_states(query, key, value, sdpa_dtype(query))
    copied = (None,) * 3 if rows is None else (rows.index, rows.order, rows.offsets)
    *lengths, _ = boundaries(layout).values()
    output, _ = _on_paths(*states, *copied, *lengths, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return output[None, ..., : value.size(-1)], None


ATTENTION: dict[BackendName, Attention] = {
    "flash": flash_attention,
    "varlen": varlen_attention,
    "segment": segment_attention,
}


@once_per_layout
def scale_of_rows(layout: FlatLayout, floor_scale: float, attn_scale: float) -> torch.Tensor:
    """`(T,)` float32: factors that turn a scale by flat position into one by position in the row."""
    places = np.stack([np.arange(layout.segments.num_tokens), layout.segments.position_ids]) + 1
    flat, row = np.log1p(places // floor_scale) * attn_scale + 1
    return layout.tensor((row / flat).astype(np.float32))


def _dispatch(attend: Attention, previous: str, module, query, key, value, attention_mask, **kwargs):
    """
    Attention as transformers calls it in each layer: `attend` computes flat batches, `previous` all other calls, which
    compilers and exports trace.
    """
    if isinstance(attention_mask, FlatMask):
        return _of_layout(attend, previous, module, query, key, value, attention_mask, **kwargs)
    # No model makes such masks. Exports must not be bound to shapes by the question
    is_unlike = attention_mask is not None and not torch.compiler.is_exporting()
    if is_unlike and attention_mask.shape == (1, 1, 1, 1) and key.size(2) > 1:
        raise RuntimeError(
            "The mask that tells attention of a flat batch was copied on its way, and is now one like any other, under "
            "which all tokens see one another. Leave out what copies or offloads arguments of layers."
        )
    return upstream.attention_function(previous, module)(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable  # it would compile the layout of each batch into the code
def _of_layout(attend: Attention, previous: str, module, query, key, value, mask: FlatMask, **kwargs):
    """Attention of the flat batch whose layout its `mask` carries, with what goes around it."""
    kwargs = {name: x for name, x in kwargs.items() if name not in BOUNDARIES}
    call = partial(_attend, attend, previous)
    for around in reversed(mask.context.around):
        call = partial(around, call)
    return call(mask.context.layout, module, module, query, key, value, **kwargs)


def _attend(attend: Attention, previous: str, layout: FlatLayout, layer, module, query, key, value, **kwargs):
    """Attention of a flat batch by the backend `attend`; for what goes around it, see `masks.Around`."""
    held = vars(module)
    # Llama 4 scales queries by position in their row; their layer has used the position on the flat axis
    if held.get("attn_temperature_tuning") and not held["use_rope"]:
        floor = held["floor_scale"]
        if max(query.size(2), layout.segments.max_seqlen_k) >= floor:
            query = (query * scale_of_rows(layout, floor, held["attn_scale"])[:, None]).to(query.dtype)
    return attend(layout, previous, module, query, key, value, **kwargs)


class StandIn(str):
    """
    The name of one of our attention implementations, which runs a backend in place of the model's own implementation.

    It prints as the model's own and compares equal to it, because modeling files test for that name (`if
    config._attn_implementation in ("eager", "sdpa")`), and generation and padded rows must work as before. Its hash is
    its own, so that transformers' registries find our function. Dicts and sets therefore never find it by the name that
    it equals: GIT, which looks up its class in a dict, cannot be rebuilt from the configuration of an installed model.
    """

    key: tuple[str, BackendName]  # the implementation that it stands in for, and the backend

    def __new__(cls, previous: str, backend: BackendName):
        name = super().__new__(cls, previous)
        name.key = (previous, backend)
        return name

    def __reduce__(self):
        return register_attention, self.key  # a pickled model may be loaded where nothing is registered

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:  # torch.compile traces this
        return self.key == other.key if isinstance(other, StandIn) else self.key[0] == other

    __ne__ = object.__ne__  # asks `__eq__`, unlike that of `str`


def register_attention(previous: str, backend: BackendName) -> StandIn:
    """Register attention that runs flat batches by `backend`, other calls by `previous`; returns the name to set."""
    name = StandIn(previous, backend)
    AttentionInterface.register(name, partial(_dispatch, ATTENTION[backend], previous))
    if previous in (masks := AttentionMaskInterface()):  # else transformers makes no masks for it
        masks.register(name, masks[previous])  # padded calls keep theirs
    return name
