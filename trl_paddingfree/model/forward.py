"""The seam with a model's head: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token, or
`model(input_ids=rows, ...)` with a pooled head and read one float per row. With a `flat_batch` among the arguments, the
model computes the flat tokens instead, and the answer is the same rows.
"""

import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import upstream
from ..flat.batch import IGNORE_INDEX, FlatBatch
from .answers import EditsFound, refuse_unanswerable
from .attention import register_attention, replaced_attention
from .backends import ATTENTION_BACKENDS
from .masks import backbone_mask, boundaries
from .routes import Route
from .row_parts import RowPart, compute_in_parts
from .state_layers import carries_state, install_state_layers, rebound, state_arguments
from .vision import TYPE_ROWS, features_in_order, flat_positions

# Arguments of the padded rows, which the flat batch replaces; TRL hands the margins of pairs to the backbone
_ROW_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "labels", "flat_batch", "margin", *TYPE_ROWS)
# Makes a flat batch, or parts of one, from the `input_ids`, `attention_mask` and `labels` of a call
Flattener = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], FlatBatch | list[RowPart]]


@dataclass(frozen=True)
class FlatForward:
    """
    What the forward of a model knows of flat batches.

    Args:
        route ([`~trl_paddingfree.model.routes.Route`]):
            How the model computes them.
        carries_state (`bool`):
            Whether the model has layers that carry state, see [`~trl_paddingfree.model.state_layers`].
        edits_found ([`~trl_paddingfree.model.answers.EditsFound`]):
            Whether rows are still those that their flat batch was made of.
    """

    route: Route
    carries_state: bool
    edits_found: EditsFound = field(default_factory=EditsFound)


def _installed(model: Any) -> Any:
    """The forward that [`install`] gave `model`, with its [`FlatForward`], or `None`."""
    forward, found = model.forward, None
    while forward is not None:  # mixed precision may have wrapped ours, in a function that has all its attributes
        found = forward if hasattr(forward, "flat") else found
        forward = getattr(forward, "__wrapped__", None)
    return getattr(found, "__func__", found)


def installed(model: Any) -> FlatForward | None:
    """What the forward that [`install`] gave `model` knows of flat batches, or `None`."""
    forward = _installed(model)
    return None if forward is None else forward.flat


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

    The model must have TRL's fused LM head, or a pooled head. Calls without a `flat_batch` go to the forward and the
    attention that were there before. Nothing outside this instance changes.
    """
    replaces_attention = route.backend in ATTENTION_BACKENDS
    attention = register_attention(route.previous, route.backend) if replaces_attention else route.previous
    upstream.set_attn_implementation(model, attention)
    install_state_layers(model)
    flat = FlatForward(route, carries_state(model))
    earlier = _installed(model)
    if earlier is not None and earlier.model() is model:
        earlier.flat = flat
        return
    own_forward = model.forward if earlier is None else earlier.previous  # a copy of a model comes with its functions

    @functools.wraps(type(model).forward)  # `generate` validates its arguments against this signature
    @torch.compiler.disable(recursive=False)
    def forward(self: Any, *args: Any, flat_batch: FlatBatch | None = None, **kwargs: Any) -> Any:
        flattener, flat = forward.flattener, forward.flat  # type: ignore[attr-defined]
        previous_forward = rebound(own_forward, self)

        def compute(batch: FlatBatch, **kwargs: Any) -> Any:
            with _explained_if_long(self, batch):
                return flat_forward(self, previous_forward, flat, batch, **kwargs)

        makes_flat = flat_batch is None and flattener is not None and kwargs.get("fused_lm_head")
        if flat_batch is None and not makes_flat:
            return previous_forward(*args, **kwargs)
        if args:
            raise TypeError("Give the rows of a `flat_batch` to the model by name: `input_ids=...`.")
        if flat_batch is not None:
            flat.edits_found.ask(flat_batch, kwargs)
            return compute(flat_batch, **kwargs)
        made = flattener(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"])
        return compute_in_parts(compute, made, **kwargs) if isinstance(made, list) else compute(made, **kwargs)

    forward.flat, forward.flattener = flat, None  # type: ignore[attr-defined]
    forward.model, forward.previous = weakref.ref(model), own_forward  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def carry(model: Any, flattener: Flattener | None) -> None:
    """
    Have an installed forward lay out the rows of its own calls.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A model on which [`install`] was called.
        flattener (`Callable`, *optional*):
            Called with `input_ids`, `attention_mask` and `labels` of each call with `fused_lm_head=True` that comes
            without a `flat_batch`, and gives one. `None`: such calls are computed as rows again.
    """
    _installed(model).flattener = flattener


@contextmanager
def attention_as_before(model: Any) -> Iterator[None]:
    """Within this context, a model has the attention implementation that it was loaded with."""
    installed = upstream.attn_implementation(model)
    upstream.set_attn_implementation(model, replaced_attention(installed))
    try:
        yield
    finally:
        upstream.set_attn_implementation(model, installed)


def is_pooled(model: Any) -> bool:
    """Whether the head of `model` reads one token of each row, as for sequence classification, and scores no tokens."""
    return model.get_output_embeddings() is None


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
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 where nothing is scored; with a pooled
    head, the model's own output with logits of shape `(R, labels)`; otherwise with logits of shape
    `(R, L, vocabulary)`, 0 beyond the end of each row, and with the loss if there are `labels`.
    """
    refuse_unanswerable(model.config, kwargs, fused_lm_head=fused_lm_head)
    input_ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    kwargs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    if is_pooled(model):
        assert input_ids is not None
        return _pooled(model, previous_forward, flat, batch, input_ids, kwargs)
    if not fused_lm_head:
        return _model_output(model, previous_forward, flat, batch, labels, kwargs)
    assert labels is not None
    with _flat_backbone(model, flat, batch, batch.scored_of), _noise_of_rows(model, batch):
        # Only the router loss reads this mask: the backbone is given the layout instead. The loss is a mean over the
        # tokens of all rows, so a token counts once for each row that contains it.
        outputs = previous_forward(
            **kwargs,
            input_ids=batch.input_ids,
            position_ids=flat_positions(model, batch),
            attention_mask=batch.token_rows,
            shift_labels=batch.shift_labels,
            fused_lm_head=True,
        )
    per_token = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    values = {name: getattr(outputs, name) for name in per_token}
    rows: dict[str, Any] = {name: None if x is None else batch.scored_to_rows(x) for name, x in values.items()}
    label_mask = (labels[:, 1:] != IGNORE_INDEX).to(rows["log_probs"].device)
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
    flat_kwargs = {**kwargs, "input_ids": batch.input_ids, "position_ids": flat_positions(model, batch)}
    if labels is None:
        with _flat_backbone(model, flat, batch, calls_decoder=True), _noise_of_rows(model, batch):
            outputs = previous_forward(**flat_kwargs)
        return type(outputs)(logits=batch.tokens_to_rows(outputs.logits))
    in_rows = _flat_backbone(model, flat, batch, batch.tokens_to_rows, calls_decoder=True)
    with in_rows, _noise_of_rows(model, batch):
        outputs = previous_forward(**flat_kwargs, attention_mask=batch.token_rows, labels=labels)
    aux_loss = {name: outputs[name] for name in ("aux_loss",) if name in outputs}
    return type(outputs)(
        loss=outputs.loss, logits=outputs.logits * batch.row_mask.to(outputs.logits.device)[..., None], **aux_loss
    )


def _pooled(
    model: Any,
    previous_forward: Any,
    flat: FlatForward,
    batch: FlatBatch,
    input_ids: torch.Tensor,
    kwargs: dict[str, Any],
) -> Any:
    """
    The output of a head that reads one token of each row.

    transformers finds that token by its id, not by the mask: the last that is no padding token, or the first. Where a
    row ends in tokens that pad others (pad = eos), the head reads what stands before them, here as there.
    """
    if batch.empty_rows:
        raise ValueError(
            f"{batch.empty_rows} of {len(batch.row_mask)} rows have no token to read: leave out rows without tokens."
        )
    is_token = (input_ids != model.config.get_text_config().pad_token_id) & batch.row_mask
    last = (torch.arange(input_ids.size(1), device=input_ids.device) * is_token).argmax(1, keepdim=True)
    positions = batch.row_index.gather(1, last)

    def read(hidden):
        return hidden.squeeze(0)[positions.to(hidden.device)]

    with _flat_backbone(model, flat, batch, read, swaps_inputs=True), _noise_of_rows(model, batch):
        return previous_forward(**kwargs, input_ids=input_ids.gather(1, last))


@contextmanager
def _flat_backbone(
    model: Any,
    flat: FlatForward,
    batch: FlatBatch,
    for_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    swaps_inputs: bool = False,
    calls_decoder: bool = False,
) -> Iterator[None]:
    """
    Within this context, the model's backbone is told of the layout and returns only what the head needs.

    Args:
        model ([`~transformers.PreTrainedModel`]), flat (`FlatForward`), batch (`FlatBatch`):
            What computes what.
        for_head (`Callable`, *optional*):
            Turns the hidden states `(1, T, H)` into those that the head is given. By default, it is given all.
        swaps_inputs (`bool`, *optional*, defaults to `False`):
            Whether the backbone gets the flat tokens in place of the tokens that the head was called with.
        calls_decoder (`bool`, *optional*, defaults to `False`):
            Whether the model's own forward is called, which may call the decoder within the backbone.
    """
    layout, backend = batch.layout, flat.route.backend
    told: dict[str, Any] = {
        "use_cache": False,
        **(state_arguments(model.base_model, layout) if flat.carries_state else {}),
    }
    if "attention_mask" not in told:
        config = model.config.get_text_config()
        told["attention_mask"] = backbone_mask(backend, layout, config, model.dtype, flat.carries_state)
    if swaps_inputs:
        told |= {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    # The forward of some models (OPT) calls the decoder within the backbone that TRL's head calls
    backbones = list(dict.fromkeys((model.base_model, *([model.get_decoder()] if calls_decoder else []))))
    # A vision tower has boundaries of its own, and would take these for them
    told_boundaries = [model.get_decoder()] if hasattr(model.base_model, "get_image_features") else backbones
    given: list[torch.nn.Module] = []

    def give_layout(module, args, kwargs):
        if swaps_inputs:  # some heads hand `input_ids` on by its place
            args, kwargs = (), {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        return args, {**kwargs, **told}

    def give_boundaries(module, args, kwargs):
        return args, {**kwargs, **boundaries(layout)}

    def give_head(module, args, outputs):
        if for_head is not None and not given:  # not again, where one of the backbones is within another
            outputs.last_hidden_state = for_head(outputs.last_hidden_state)
        given.append(module)
        return outputs

    handles = [backbone.register_forward_pre_hook(give_layout, with_kwargs=True) for backbone in backbones]
    handles += [backbone.register_forward_hook(give_head) for backbone in backbones]
    if backend == "positions":  # transformers' own arguments, in place of a mask
        handles += [text.register_forward_pre_hook(give_boundaries, with_kwargs=True) for text in told_boundaries]
    try:
        with features_in_order(model, batch):
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
def _explained_if_long(model: Any, batch: FlatBatch) -> Iterator[None]:
    """Within this context, what a model raises on a flat row that is longer than a row may be comes with the reason."""
    length, limits = batch.input_ids.size(1), upstream.position_limits(model)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:
        if not limits or length <= min(limits) or "allocate memory" in str(error):
            raise
        raise ValueError(
            f"{type(model).__name__} cannot compute a flat row of {length} tokens, more than the {min(limits)} "
            f"positions of its configuration ({type(error).__name__}: {error}). Use smaller batches, in training also "
            f"`max_tokens_per_micro_batch={min(limits)}`, or set `padding_free=False`."
        ) from error


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
