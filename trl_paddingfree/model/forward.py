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

from .. import upstream
from ..flat.batch import FlatBatch
from .attention import register_attention
from .backends import ATTENTION_BACKENDS
from .masks import backbone_mask, boundaries
from .routes import Route, carries_state
from .vision import TYPE_ROWS, features_in_order, flat_positions

# Arguments of the padded rows, which the flat batch replaces
_ROW_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "labels", "flat_batch", *TYPE_ROWS)


@dataclass(frozen=True)
class FlatForward:
    """
    What the forward of a model knows of flat batches.

    Args:
        route ([`~trl_paddingfree.model.routes.Route`]):
            How the model computes them.
        needs_boundaries (`bool`):
            Whether the model is told of boundaries by transformers' own arguments, beside or in place of a mask.
    """

    route: Route
    needs_boundaries: bool


def _installed(model: Any) -> Any:
    """The forward that [`install`] gave `model`, or `None`."""
    forward, found = model.forward, None
    while forward is not None:  # mixed precision may have wrapped ours, in a function that has all its attributes
        found = forward if hasattr(forward, "flat") else found
        forward = getattr(forward, "__wrapped__", None)
    return getattr(found, "__func__", found)


def installed_route(model: Any) -> Route | None:
    """The route that [`install`] gave `model`, or `None`."""
    forward = _installed(model)
    return None if forward is None else forward.flat.route


def install(model: Any, route: Route) -> None:
    """
    Give one model instance a forward that understands `flat_batch`. Calling it again changes the route.

    The model must have TRL's fused LM head. Calls without a `flat_batch` go to the forward and the attention that were
    there before. Nothing outside this instance changes.
    """
    replaces_attention = route.backend in ATTENTION_BACKENDS
    attention = register_attention(route.previous, route.backend) if replaces_attention else route.previous
    upstream.set_attn_implementation(model, attention)
    flat = FlatForward(route, needs_boundaries(model, route))
    if (installed := _installed(model)) is not None:
        installed.flat = flat
        return
    previous_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, flat_batch: FlatBatch | None = None, **kwargs: Any) -> Any:
        if flat_batch is None:
            return previous_forward(*args, **kwargs)
        return flat_forward(self, previous_forward, forward.flat, flat_batch, **kwargs)  # type: ignore[attr-defined]

    forward.flat = flat  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def flat_forward(
    model: Any,
    previous_forward: Any,
    flat: FlatForward,
    batch: FlatBatch,
    *,
    fused_lm_head: bool = False,
    **kwargs: Any,
) -> Any:
    """
    Compute a flat batch and answer in rows.

    Returns what `previous_forward` returns for the padded rows: with `fused_lm_head=True`, TRL's
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 where nothing is scored; otherwise
    the model's own output with logits of shape `(R, L, vocabulary)`, 0 beyond the end of each row.
    """
    labels = kwargs.get("labels")
    kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    with (
        _flat_backbone(model, flat, batch, scored_only=fused_lm_head),
        _noise_of_rows(model, batch),
        features_in_order(model, batch),
    ):
        flat_kwargs = {**kwargs, "input_ids": batch.input_ids, "position_ids": flat_positions(model, batch)}
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
def _flat_backbone(model: Any, flat: FlatForward, batch: FlatBatch, scored_only: bool) -> Iterator[None]:
    """Within this context, the model's backbone is told of the layout and returns only what the head needs."""
    mask = backbone_mask(flat.route.backend, batch.layout, model.config.get_text_config(), model.dtype)
    told = boundaries(batch.layout) if flat.needs_boundaries else {}

    def give_layout(module, args, kwargs):
        return args, {**kwargs, "attention_mask": mask, "use_cache": False}

    def give_boundaries(module, args, kwargs):
        return args, {**kwargs, **told}

    def keep_scored(module, args, outputs):
        scored = outputs.last_hidden_state.index_select(1, batch.scored_index.to(outputs.last_hidden_state.device))
        outputs.last_hidden_state = scored
        return outputs

    backbone = model.base_model
    # A vision tower has boundaries of its own, and would take these for them
    text = model.get_decoder() if hasattr(backbone, "get_image_features") else backbone
    handles = [
        backbone.register_forward_pre_hook(give_layout, with_kwargs=True),
        text.register_forward_pre_hook(give_boundaries, with_kwargs=True),
    ]
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


def needs_boundaries(model: Any, route: Route) -> bool:
    """Whether the model is told of boundaries by transformers' own arguments, beside or in place of a mask."""
    return route.backend == "positions" or carries_state(model)
