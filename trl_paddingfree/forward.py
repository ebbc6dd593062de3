"""The seam with TRL's fused LM head: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token. With a
`flat_batch` among the arguments, the model computes the flat tokens instead, and the answer is the same rows.
"""

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from . import seams
from .attention import BACKENDS, FlatMask, register_attention
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
            `"flash"`, `"varlen"`, `"segment"` or `"mask"`.
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
            "mask": f"mask: {self.previous} under a dense 4-D mask",
        }[self.backend]


def choose_route(model: PreTrainedModel, backend: str = "auto", dtype: torch.dtype | None = None) -> Route:
    """
    Choose how `model` computes flat batches.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The causal language model.
        backend (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, or the name of one backend, which is then used or refused.
        dtype (`torch.dtype`, *optional*):
            The dtype that attention will run in. Defaults to the model's.

    Raises:
        `ValueError`: If the backend that was asked for cannot serve this model, with every reason.
    """
    route = installed_route(model)
    previous = route.previous if route else seams.attn_implementation(model)
    reasons: dict[str, list[str]] = {name: [] for name in (*BACKENDS, "mask")}
    if not seams.takes_attention_function(model):
        for name in BACKENDS:
            reasons[name].append(f"{type(model).__name__} does not use transformers' `AttentionInterface`")
    if "flash" not in previous:
        reasons["flash"].append(
            f"the model was loaded with `attn_implementation={previous!r}`: load it with 'flash_attention_2' (`pip "
            "install flash-attn`), 'flash_attention_3' or a hub kernel"
        )
    else:
        reasons["varlen"].append(f"the model was loaded with `attn_implementation={previous!r}`, which does the same")
        reasons["segment"].append(f"`attn_implementation={previous!r}` takes no mask: load the model with 'sdpa'")
    if previous != "sdpa":
        reasons["varlen"].append(f"it stands in for 'sdpa', and the model was loaded with {previous!r}")
    if model.device.type != "cuda":
        reasons["varlen"].append(f"the model is on {model.device.type}, the kernel needs CUDA")
    if (dtype or model.dtype) not in (torch.float16, torch.bfloat16):
        reasons["varlen"].append(f"attention runs in {dtype or model.dtype}, the kernel needs float16 or bfloat16")
    if previous == "flex_attention":
        reasons["segment"].append("flex_attention takes block masks: load the model with 'sdpa'")
        reasons["mask"].append("flex_attention takes block masks: load the model with 'sdpa'")
    if backend == "auto":
        backend = next((name for name in reasons if not reasons[name]), "mask")
    if backend not in reasons:
        raise ValueError(f"`flat_attention={backend!r}` is not one of 'auto', {', '.join(map(repr, reasons))}.")
    if reasons[backend]:
        listed = "\n    ".join(reasons[backend])
        raise ValueError(f"`flat_attention={backend!r}` cannot serve this model:\n    {listed}")
    return Route(backend, previous)


def installed_route(model: PreTrainedModel) -> Route | None:
    """The route that [`install`] gave `model`, or `None`."""
    return getattr(model.forward, "route", None)


def install(model: PreTrainedModel, route: Route) -> None:
    """
    Give one model instance a forward that understands `flat_batch`. Calling it again changes the route.

    The model must have TRL's fused LM head. Calls without a `flat_batch` go to the forward and the attention that were
    there before. Nothing outside this instance changes.
    """
    previous_forward = getattr(model.forward, "previous_forward", model.forward)
    if route.backend != "mask":
        seams.set_attn_implementation(model, register_attention(route.previous, route.backend))
    elif installed_route(model):
        seams.set_attn_implementation(model, route.previous)

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, flat_batch: FlatBatch | None = None, **kwargs: Any) -> Any:
        if flat_batch is None:
            return previous_forward(*args, **kwargs)
        return flat_forward(self, previous_forward, route, flat_batch, **kwargs)

    forward.__dict__.update(route=route, previous_forward=previous_forward)
    model.forward = types.MethodType(forward, model)


def flat_forward(
    model: Any, previous_forward: Any, route: Route, batch: FlatBatch, *, fused_lm_head: bool = False, **kwargs: Any
) -> Any:
    """
    Compute a flat batch and answer in rows.

    Returns what `previous_forward` returns for the padded rows: with `fused_lm_head=True`, TRL's
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 where nothing is scored; otherwise
    the model's own output with logits of shape `(R, L, vocabulary)`, 0 beyond the end of each row.
    """
    labels = kwargs.get("labels")
    kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    with _flat_backbone(model, route, batch, scored_only=fused_lm_head):
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
def _flat_backbone(model: PreTrainedModel, route: Route, batch: FlatBatch, scored_only: bool) -> Iterator[None]:
    """Within this context, the model's backbone gets the layout as its mask and returns only what the head needs."""

    def give_layout(module, args, kwargs):
        return args, {**kwargs, "attention_mask": _mask(model, route, batch.layout), "use_cache": False}

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


def _mask(model: PreTrainedModel, route: Route, layout: FlatLayout):
    """What the backbone gets as its attention mask."""
    if route.backend != "mask":
        return FlatMask.carrying(layout)
    config, dtype = model.config.get_text_config(), model.dtype
    allowed = torch.from_numpy(layout.segments.dense_mask()).to(model.device)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if len(layer_types) < 2:
        window = config.sliding_window if layer_types == {"sliding_attention"} else None
        return _additive(allowed, layout, window, dtype)
    return {
        kind: _additive(allowed, layout, config.sliding_window if kind == "sliding_attention" else None, dtype)
        for kind in layer_types
    }


def _additive(allowed: torch.Tensor, layout: FlatLayout, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`(1, 1, T, T)` mask to add to the scores."""
    if window is not None:
        positions = torch.from_numpy(np.asarray(layout.segments.position_ids)).to(allowed.device)
        allowed = allowed & (positions[None] > positions[:, None] - window)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
