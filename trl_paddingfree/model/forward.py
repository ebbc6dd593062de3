"""The seam with TRL's fused LM head: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token. With a
`flat_batch` among the arguments, the model computes the flat tokens instead, and the answer is the same rows.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import upstream
from ..flat.batch import IGNORE_INDEX, FlatBatch
from .answers import EditsFound, refuse_unanswerable
from .attention import register_attention
from .backends import ATTENTION_BACKENDS
from .masks import backbone_mask, boundaries
from .routes import Route, carries_state

# Arguments of the padded rows, which the flat batch replaces
_ROW_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "labels", "flat_batch")


@dataclass(frozen=True)
class FlatForward:
    """
    What the forward of a model knows of flat batches.

    Args:
        route ([`~trl_paddingfree.model.routes.Route`]):
            How the model computes them.
        needs_boundaries (`bool`):
            Whether the model is told of boundaries by transformers' own arguments, beside or in place of a mask.
        edits_found ([`~trl_paddingfree.model.answers.EditsFound`]):
            Whether rows are still those that their flat batch was made of.
    """

    route: Route
    needs_boundaries: bool
    edits_found: EditsFound = field(default_factory=EditsFound)


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


def ask_edits(model: Any, batch: FlatBatch, rows: dict[str, Any]) -> None:
    """Ask whether rows are still those of `batch`, as each call of `model` with them does, see [`EditsFound`]."""
    if (forward := _installed(model)) is not None:
        forward.flat.edits_found.ask(batch, rows)


def read_edits(model: Any) -> None:
    """Raise what the device has found of edited rows in the last calls of `model`, see [`EditsFound`]."""
    if (forward := _installed(model)) is not None:
        forward.flat.edits_found.read()


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
        if args:
            raise TypeError("Give the rows of a `flat_batch` to the model by name: `input_ids=...`.")
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
    the model's own output with logits of shape `(R, L, vocabulary)`, 0 beyond the end of each row, and with the loss if
    there are `labels`.
    """
    refuse_unanswerable(model.config, kwargs, fused_lm_head=fused_lm_head)
    flat.edits_found.ask(batch, kwargs)
    labels = kwargs.get("labels")
    kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    if not fused_lm_head:
        return _model_output(model, previous_forward, flat, batch, labels, kwargs)
    assert labels is not None
    with _flat_backbone([model.base_model], model, flat, batch, batch.scored_of), _noise_of_rows(model, batch):
        # Only the router loss reads this mask: the backbone is given the layout instead. The loss is a mean over the
        # tokens of all rows, so a token counts once for each row that contains it.
        outputs = previous_forward(
            **kwargs,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.token_rows,
            shift_labels=batch.shift_labels,
            fused_lm_head=True,
        )
    per_token = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    values = {name: getattr(outputs, name) for name in per_token}
    rows: dict[str, Any] = {name: None if x is None else batch.scored_to_rows(x) for name, x in values.items()}
    label_mask = labels[:, 1:] != IGNORE_INDEX
    rows = {name: None if x is None else x * label_mask for name, x in rows.items()}
    num_items = kwargs.get("num_items_in_batch")
    loss = -rows["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if outputs.aux_loss is not None:
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * outputs.aux_loss
    return replace(outputs, **rows, label_mask=label_mask, loss=loss)


def _model_output(
    model: Any, previous_forward: Any, flat: FlatForward, batch: FlatBatch, labels: Any, kwargs: dict[str, Any]
) -> Any:
    """
    The model's own output: its logits of rows, and its loss if there are labels.

    For the loss, the model's head and loss are given the hidden states of rows, so that both are the model's own code.
    """
    flat_kwargs = {**kwargs, "input_ids": batch.input_ids, "position_ids": batch.position_ids}
    # The forward of some models (OPT) calls the decoder within the backbone that TRL's head calls
    backbones = list(dict.fromkeys((model.base_model, model.get_decoder())))
    if labels is None:
        with _flat_backbone(backbones, model, flat, batch), _noise_of_rows(model, batch):
            outputs = previous_forward(**flat_kwargs)
        return type(outputs)(logits=batch.tokens_to_rows(outputs.logits))
    with _flat_backbone(backbones, model, flat, batch, batch.tokens_to_rows), _noise_of_rows(model, batch):
        outputs = previous_forward(**flat_kwargs, attention_mask=batch.token_rows, labels=labels)
    aux_loss = {name: outputs[name] for name in ("aux_loss",) if name in outputs}
    return type(outputs)(loss=outputs.loss, logits=outputs.logits * batch.row_mask[..., None], **aux_loss)


@contextmanager
def _flat_backbone(
    backbones: list[torch.nn.Module],
    model: Any,
    flat: FlatForward,
    batch: FlatBatch,
    for_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[None]:
    """Within this context, the model's backbone is told of the layout and returns only what the head needs."""
    mask = backbone_mask(flat.route.backend, batch.layout, model.config.get_text_config(), model.dtype)
    told = boundaries(batch.layout) if flat.needs_boundaries else {}
    given: list[torch.nn.Module] = []

    def give_layout(module, args, kwargs):
        return args, {**kwargs, **told, "attention_mask": mask, "use_cache": False}

    def give_head(module, args, outputs):
        if for_head is not None and not given:  # not again, where one of the backbones is within another
            outputs.last_hidden_state = for_head(outputs.last_hidden_state)
        given.append(module)
        return outputs

    handles = [backbone.register_forward_pre_hook(give_layout, with_kwargs=True) for backbone in backbones]
    handles += [backbone.register_forward_hook(give_head) for backbone in backbones]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not given:
        raise ValueError(
            f"The forward of {type(model).__name__} calls neither its `base_model` nor its decoder, so nothing tells "
            "its layers of the flat batch: call it with `fused_lm_head=True`, or set `padding_free=False`."
        )


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
