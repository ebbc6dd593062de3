"""The seam with TRL's fused LM head: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token. With a
`flat_batch` among the arguments, the model computes the flat tokens instead, and the answer is the same rows.
"""

import functools
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from . import seams
from .attention import BACKENDS, BOUNDARIES, FlatMask, register_attention, replaced_attention
from .batch import FlatBatch
from .layout import FlatLayout

logger = logging.get_logger(__name__)

# Arguments of the padded rows, which the flat batch replaces
_ROW_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "labels", "flat_batch")


@dataclass(frozen=True)
class Route:
    """
    How a model computes flat batches.

    Args:
        backend (`str`):
            `"flash"`, `"varlen"`, `"segment"`, `"positions"` or `"mask"`.
        previous (`str`):
            The attention implementation that the model was loaded with.
    """

    backend: str
    previous: str

    def __str__(self) -> str:
        return {
            "flash": f"flash: {self.previous} over segments",
            "varlen": "varlen: PyTorch's flash attention kernel over segments",
            "segment": f"segment: one {self.previous} call per segment",
            "positions": f"positions: {self.previous}, told of sequences by their `position_ids`",
            "mask": f"mask: {self.previous} under a dense 4-D mask",
        }[self.backend]


def choose_route(
    model: PreTrainedModel,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Route:
    """
    Choose how `model` computes flat batches.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The causal language model.
        backend (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, or the name of one backend, which is then used or refused.
        dtype (`torch.dtype`, *optional*):
            The dtype that attention will run in. Defaults to the model's.
        device (`torch.device`, *optional*):
            The device that attention will run on. Defaults to the model's.

    Raises:
        `ValueError`: If the backend that was asked for cannot serve this model, with every reason.
    """
    previous = replaced_attention(seams.attn_implementation(model))
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} keeps its backbone under another name than its `base_model_prefix` "
            f"({model.base_model_prefix!r}), and TRL's fused LM head does not find it, with padding or without. Set "
            "`model.base_model_prefix = 'model'` before you make the trainer."
        )
    reasons = _reasons_against(model, previous, dtype or model.dtype, device or model.device)
    if backend != "auto" and backend not in reasons:
        raise ValueError(f"`flat_attention={backend!r}` is not one of 'auto', {', '.join(map(repr, reasons))}.")
    wanted = reasons if backend == "auto" else [backend]
    if (found := next((name for name in wanted if not reasons[name]), None)) is None:
        listed = "\n    ".join(dict.fromkeys(reason for name in wanted for reason in reasons[name]))
        raise ValueError(f"`flat_attention={backend!r}` cannot serve this model:\n    {listed}")
    return Route(found, previous)


def routes_from(route: Route) -> list[Route]:
    """`route`, and slower ones that ask less of a model: its own attention, per segment, or told of sequences."""
    slower = ["segment"] if route.backend == "varlen" else []
    slower.append("positions" if _is_kernel(route.previous) else "mask")
    return list(dict.fromkeys([route, *(Route(backend, route.previous) for backend in slower)]))


def _is_kernel(previous: str) -> bool:
    """Whether an attention implementation is flash attention or comes from the hub: it takes boundaries, not masks."""
    return "flash" in previous or "/" in previous


def _reasons_against(
    model: PreTrainedModel, previous: str, dtype: torch.dtype, device: torch.device
) -> dict[str, list[str]]:
    """Why each backend cannot serve a model loaded with the attention implementation `previous`, fastest first."""
    reasons: dict[str, list[str]] = {name: [] for name in (*BACKENDS, "positions", "mask")}
    if not seams.takes_attention_function(model):
        for name in BACKENDS:
            reasons[name].append(f"{type(model).__name__} does not use transformers' `AttentionInterface`")
    if _is_kernel(previous):
        reasons["varlen"].append(f"the model was loaded with `attn_implementation={previous!r}`, which does the same")
        for name in ("segment", "mask"):
            reasons[name].append(f"`attn_implementation={previous!r}` takes no mask: load the model with 'sdpa'")
    else:
        for name in ("flash", "positions"):
            reasons[name].append(
                f"the model was loaded with `attn_implementation={previous!r}`: load it with 'flash_attention_2' (`pip "
                "install flash-attn`), 'flash_attention_3' or a hub kernel"
            )
    if previous != "sdpa":
        reasons["varlen"].append(f"it stands in for 'sdpa', and the model was loaded with {previous!r}")
    if device.type != "cuda":
        reasons["varlen"].append(f"the model is on {device.type}, the kernel needs CUDA")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons["varlen"].append(f"attention runs in {dtype}, the kernel needs float16 or bfloat16")
    if previous == "flex_attention":
        reasons["segment"].append("flex_attention takes block masks: load the model with 'sdpa'")
        reasons["mask"].append("flex_attention takes block masks: load the model with 'sdpa'")
    return reasons


def installed_route(model: Any) -> Route | None:
    """The route that [`install`] gave `model`, or `None`."""
    forward = model.forward
    while forward is not None:  # mixed precision may have wrapped ours
        if hasattr(forward, "takes_flat_batch"):
            return model.flat_route
        forward = getattr(forward, "__wrapped__", None)
    return None


def install(model: Any, route: Route) -> None:
    """
    Give one model instance a forward that understands `flat_batch`. Calling it again changes the route.

    The model must have TRL's fused LM head. Calls without a `flat_batch` go to the forward and the attention that were
    there before. Nothing outside this instance changes.
    """
    is_installed = installed_route(model) is not None
    attention = register_attention(route.previous, route.backend) if route.backend in BACKENDS else route.previous
    seams.set_attn_implementation(model, attention)
    model.flat_route, model.needs_boundaries = route, needs_boundaries(model, route)
    if is_installed:
        return
    previous_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, flat_batch: FlatBatch | None = None, **kwargs: Any) -> Any:
        if flat_batch is None:
            return previous_forward(*args, **kwargs)
        return flat_forward(self, previous_forward, flat_batch, **kwargs)

    forward.takes_flat_batch = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def flat_forward(
    model: Any, previous_forward: Any, batch: FlatBatch, *, fused_lm_head: bool = False, **kwargs: Any
) -> Any:
    """
    Compute a flat batch and answer in rows.

    Returns what `previous_forward` returns for the padded rows: with `fused_lm_head=True`, TRL's
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 where nothing is scored; otherwise
    the model's own output with logits of shape `(R, L, vocabulary)`, 0 beyond the end of each row.
    """
    labels = kwargs.get("labels")
    kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    with _flat_backbone(model, batch, scored_only=fused_lm_head), _noise_of_rows(model, batch):
        flat_kwargs = {**kwargs, "input_ids": batch.input_ids, "position_ids": batch.position_ids}
        if not fused_lm_head:
            outputs = previous_forward(**flat_kwargs)
            return type(outputs)(logits=batch.tokens_to_rows(outputs.logits))
        # Only the router loss reads this mask: the backbone is given the layout instead. The loss is a mean over the
        # tokens of all rows, so a token counts once for each row that contains it.
        outputs = previous_forward(
            **flat_kwargs, attention_mask=batch.token_rows, shift_labels=batch.shift_labels, fused_lm_head=True
        )
    per_token = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    values = {name: getattr(outputs, name) for name in per_token}
    rows = {name: None if x is None else batch.scored_to_rows(x) for name, x in values.items()}
    assert labels is not None
    label_mask = labels[:, 1:] != -100
    rows = {name: None if x is None else x * label_mask for name, x in rows.items()}
    return replace(outputs, **rows, label_mask=label_mask, loss=None)


@contextmanager
def _flat_backbone(model: Any, batch: FlatBatch, scored_only: bool) -> Iterator[None]:
    """Within this context, the model's backbone is told of the layout and returns only what the head needs."""
    mask = layout_mask(model.flat_route, batch.layout, model.config.get_text_config(), model.dtype)
    boundaries = layout_boundaries(batch.layout) if model.needs_boundaries else {}

    def give_layout(module, args, kwargs):
        return args, {**kwargs, **boundaries, "attention_mask": mask, "use_cache": False}

    def keep_scored(module, args, outputs):
        scored = outputs.last_hidden_state.index_select(1, batch.scored_index.to(outputs.last_hidden_state.device))
        outputs.last_hidden_state = scored
        return outputs

    backbone = model.base_model
    handles = [backbone.register_forward_pre_hook(give_layout, with_kwargs=True)]
    if scored_only:
        handles.append(backbone.register_forward_hook(keep_scored))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _noise_of_rows(model: Any, batch: FlatBatch) -> Iterator[None]:
    """Within this context, NEFTune's noise has the size that it has in rows: it shrinks with the length of an axis."""
    embeddings = model.get_input_embeddings()
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    if alpha is None:
        yield
        return
    embeddings.neftune_noise_alpha = alpha * math.sqrt(batch.input_ids.size(1) / batch.row_index.size(1))
    try:
        yield
    finally:
        embeddings.neftune_noise_alpha = alpha


def is_state_layer(module: torch.nn.Module) -> bool:
    """
    Whether `module` hands a state from token to token.

    Every such layer that can keep the sequences of a flat row apart begins with a short convolution.
    """
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def carries_state(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` hands a state from token to token, beside attention: it cannot share prefixes."""
    return any(map(is_state_layer, model.get_decoder().modules()))


def needs_boundaries(model: PreTrainedModel, route: Route) -> bool:
    """Whether the model is told of boundaries by transformers' own arguments, beside or in place of a mask."""
    return route.backend == "positions" or carries_state(model)


def layout_boundaries(layout: FlatLayout) -> dict[str, Any]:
    """The boundaries of a flat batch, as [`~transformers.modeling_flash_attention_utils.FlashAttentionKwargs`]."""
    lengths = (layout.segments.max_seqlen_q, layout.segments.max_seqlen_k)
    return dict(zip(BOUNDARIES, (layout.cu_seqlens_q, layout.cu_seqlens_k, *lengths, layout.seq_idx), strict=True))


# What transformers calls the kinds of layers of a model, and of the parts of a layer that has an attention and a state
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_STATE = ("linear_attention", "conv")
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": _SLIDING}


def layout_mask(route: Route, layout: FlatLayout, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """
    What the backbone gets as its attention mask.

    Args:
        route (`Route`):
            How the model computes the batch.
        layout (`FlatLayout`):
            The layout of the batch.
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of the text model.
        dtype (`torch.dtype`):
            Dtype of a dense mask.

    Returns:
        `FlatMask`, `torch.Tensor` of shape `(1, 1, T, T)`, a dict of one of these by kind of layer, or `None`.
    """
    if route.backend == "positions":
        return None
    kinds = {_HYBRID.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()}
    if not kinds:
        kinds = {_FULL if getattr(config, "sliding_window", None) is None else _SLIDING}
    if route.backend in BACKENDS and _CHUNKED not in kinds:
        return FlatMask.carrying(layout)  # attention functions are given their window
    masks: dict[str, Any] = {}
    for kind in kinds.difference(_STATE):
        kind_layout = layout.chunked(config.attention_chunk_size) if kind == _CHUNKED else layout
        if route.backend in BACKENDS:
            masks[kind] = FlatMask.carrying(kind_layout)
        else:
            masks[kind] = kind_layout.dense_mask(config.sliding_window if kind == _SLIDING else None, dtype)
    return next(iter(masks.values()), None) if len(masks) < 2 else {**dict.fromkeys(_STATE), **masks}
