"""The seam with a model's head: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token, or
`model(input_ids=rows, ...)` with a pooled head and read one float per row. With a `flat_batch` among the arguments, the
model computes the flat tokens instead, and the answer is the same rows.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from .. import upstream
from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs, RowPart
from . import architecture
from .edits import refuse_unanswerable
from .masks import boundaries
from .restored import attributes_set
from .routes import backbone_mask
from .state_layers import state_arguments
from .vision import TYPE_ROWS, features_in_order, flat_positions, takes_images

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

    from .flat_model import FlatModel

    Scored = tuple[FusedCausalLMOutput, tuple[torch.Tensor, ...] | None]

Answer = TypeVar("Answer")

# What TRL's head may say of each scored token
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Arguments of the padded rows, which the flat batch replaces; TRL hands the margins of pairs to the backbone
_ROW_ARGUMENTS = ("attention_mask", "position_ids", "margin", *TYPE_ROWS)
# What the libraries beneath PyTorch say of a failed allocation, in errors of no class of their own
_FAILURES = re.compile(r"can't allocate memory|out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)


def is_pooled(model: PreTrainedModel) -> bool:
    """Whether the head of `model` reads one token of each row, as for sequence classification, and scores no tokens."""
    return model.get_output_embeddings() is None


def flat_forward(
    flat_model: "FlatModel",
    batch: FlatBatch,
    *,
    input_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    fused_lm_head: bool = False,
    **kwargs: object,
) -> ModelOutput:
    """
    Compute a flat batch and answer in rows.

    Returns what the model's own forward returns for the padded rows: with `fused_lm_head=True`, TRL's
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 where nothing is scored; with a pooled
    head, the model's own output with logits of shape `(R, labels)`; otherwise with logits of shape
    `(R, L, vocabulary)`, 0 beyond the end of each row, and with the loss if there are `labels`.
    """
    model, in_parts = flat_model.model, batch.parts and torch.is_grad_enabled()
    if in_parts and not (fused_lm_head and labels is not None):  # whole logits would not fit in parts either
        raise ValueError(
            "A micro-batch that does not fit into its budget runs in parts beneath the loss, and there the model must "
            "be called with `labels` and `fused_lm_head=True`: do so, or leave `memory_budget` and "
            "`max_tokens_per_micro_batch` out."
        )
    refuse_unanswerable(model.config, kwargs, fused_lm_head=fused_lm_head)
    beside: Inputs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    if batch.images is not None:
        beside = batch.images.arguments(beside)
    elif beside.get("pixel_values") is not None:
        raise ValueError(
            "The call has `pixel_values`, and its flat batch knows of no images: have TRL's pass call the model, which "
            "says whose they are, or set `padding_free=False`."
        )
    if flat_model.group is not None and not fused_lm_head:
        raise ValueError(
            f"`sequence_parallel_size={flat_model.group.size}`: processes have slices of the tokens, and no logits of "
            "rows. Leave out what wants these, such as `compute_metrics` and `predict`, or set it to 1."
        )
    if is_pooled(model):
        assert input_ids is not None
        return _pooled(flat_model, batch, input_ids, beside)
    if not fused_lm_head:
        return _model_output(flat_model, batch, labels, beside)
    assert labels is not None
    if in_parts:
        outputs = scored_in_parts(flat_model, batch, beside, labels)
    else:
        outputs, _ = scored_in_rows(flat_model, batch, beside)
    return _with_loss(model, outputs, labels, beside)


def scored_in_rows(flat_model: "FlatModel", batch: FlatBatch, beside: Inputs) -> "Scored":
    """
    What TRL's fused head says of rows, given what is `beside` them: its [`~trl.trainer.utils.FusedCausalLMOutput`] with
    fields of shape `(R, L-1)`. And the logits of routers, of shape `(T, experts)` for each layer, or `None`.
    """
    group = flat_model.group
    own = batch if group is None else group.slice(batch, flat_model.model.config.get_text_config())
    apart = nullcontext() if group is None or not flat_model.model.training else group.drawing_apart(flat_model.model)
    with apart, flat_backbone(flat_model, own, own.scored_of) as given:
        inputs = {**flat_inputs(flat_model, own), "shift_labels": own.shift_labels}
        outputs = flat_model.forwards[-1](**beside, **inputs, fused_lm_head=True)
    values = _per_token(outputs) if group is None else group.gather_scored(_per_token(outputs), batch)
    outputs = replace(outputs, **{name: batch.scored_to_rows(x) for name, x in values.items()})
    routers = None if outputs.aux_loss is None else given[0]["router_logits"]
    if routers is not None and group is not None:  # their loss is one of all tokens
        routers = tuple(group.gather_tokens(x, batch.layout.segments.num_tokens) for x in routers)
        outputs = replace(outputs, aux_loss=upstream.router_loss(flat_model.model, routers, batch.token_rows))
    return outputs, routers


def scored_in_parts(
    flat_model: "FlatModel", batch: FlatBatch, beside: Inputs, labels: torch.Tensor
) -> "FusedCausalLMOutput":
    """
    What [`scored_in_rows`] says, of rows that the model computes in parts, one after another, with the gradients of the
    whole. The loss is the caller's, over all rows: one that couples rows is as exact as any other.
    """

    def answer(part: RowPart, _: torch.Tensor) -> "Scored":
        return scored_in_rows(flat_model, part.batch, {**beside, **part.arguments})

    outputs, routers = zip(*of_parts(batch, answer, labels), strict=True)
    order = torch.cat([part.rows for part in batch.parts]).argsort()
    order = order.to(outputs[0].log_probs.device)  # a model on several devices answers on that of its head
    joined = {name: torch.cat([output[name] for output in outputs])[order] for name in _per_token(outputs[0])}
    whole = replace(outputs[0], **joined)
    if routers[0] is None:
        return whole
    layers = tuple(map(torch.cat, zip(*routers, strict=True)))  # the loss of routers is one of all tokens together
    weights = torch.cat([part.batch.token_rows for part in batch.parts], 1)
    return replace(whole, aux_loss=upstream.router_loss(flat_model.model, layers, weights))


def of_parts(batch: FlatBatch, answer: Callable[[RowPart, torch.Tensor], Answer], tensor: torch.Tensor) -> list[Answer]:
    """
    What `answer` gives of each part, with the `tensor`, one part after another. Each keeps nothing between its
    forward and its backward pass, which computes it again. The last is the first to have its backward pass, and keeps
    what it computed.
    """
    *first, last = batch.parts
    # By the device of the tensor, what is checkpointed finds the random state to come back to
    return [checkpoint(answer, part, tensor, use_reentrant=False) for part in first] + [answer(last, tensor)]


def flat_inputs(flat_model: "FlatModel", batch: FlatBatch) -> dict[str, torch.Tensor]:
    """The arguments of a model that are flat tensors."""
    # Only the router loss reads this mask: the backbone is given the layout instead. The loss is a mean over the tokens
    # of all rows, so a token counts once for each row that contains it
    positions = flat_positions(flat_model.model, batch)
    return {"input_ids": batch.input_ids, "position_ids": positions, "attention_mask": batch.token_rows}


def _per_token(outputs: "FusedCausalLMOutput") -> dict[str, torch.Tensor]:
    """The values that TRL's head gives for each token."""
    return {name: outputs[name] for name in _PER_TOKEN if name in outputs}


def _with_loss(
    model: PreTrainedModel, outputs: "FusedCausalLMOutput", labels: torch.Tensor, beside: Inputs
) -> "FusedCausalLMOutput":
    """What TRL's head says of rows, where `labels` are scored, with the loss that it would have for them."""
    values, num_items = _per_token(outputs), beside.get("num_items_in_batch")
    label_mask = (labels[:, 1:] != IGNORE_INDEX).to(values["log_probs"].device)
    masked = {name: x * label_mask for name, x in values.items()}
    loss = -masked["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if outputs.aux_loss is not None:
        share = architecture.config_value(model.config.get_text_config(), "router_aux_loss_coef")
        loss = loss + (share or 0.0) * outputs.aux_loss
    return replace(outputs, **masked, label_mask=label_mask, loss=loss)


def _model_output(
    flat_model: "FlatModel", batch: FlatBatch, labels: torch.Tensor | None, beside: Inputs
) -> ModelOutput:
    """The model's own output: logits of rows, and, if there are labels, its own loss, from hidden states of rows."""
    arguments = beside if labels is None else {**beside, "labels": labels}
    with flat_backbone(flat_model, batch, None if labels is None else batch.tokens_to_rows, calls_decoder=True):
        outputs = flat_model.forwards[-1](**arguments, **flat_inputs(flat_model, batch))
    if labels is None:
        logits = batch.tokens_to_rows(outputs.logits)
    else:
        logits = outputs.logits * batch.row_mask.to(outputs.logits.device)[..., None]
    kept = {name: outputs[name] for name in ("loss", "aux_loss") if name in outputs}
    return type(outputs)(logits=logits, **kept)


def _pooled(flat_model: "FlatModel", batch: FlatBatch, input_ids: torch.Tensor, beside: Inputs) -> ModelOutput:
    """
    The output of a head that reads one token of each row.

    transformers finds that token by its id, not by the mask: the last that is no padding token, or the first. Where a
    row ends in tokens that pad others (pad = eos), the head reads what stands before them, here as there.
    """
    if batch.empty_rows:
        raise ValueError(f"{batch.empty_rows} of {len(batch.row_mask)} rows have no token to read: leave them out.")
    is_token = (input_ids != flat_model.model.config.get_text_config().pad_token_id) & batch.row_mask
    last = (torch.arange(input_ids.size(1), device=input_ids.device) * is_token).argmax(1, keepdim=True)
    positions = batch.row_index.gather(1, last)

    def read(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.squeeze(0)[positions.to(hidden.device)]

    with flat_backbone(flat_model, batch, read, swaps_inputs=True):
        return flat_model.forwards[-1](**beside, input_ids=input_ids.gather(1, last))


@contextmanager
def flat_backbone(
    flat_model: "FlatModel",
    batch: FlatBatch,
    for_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    swaps_inputs: bool = False,
    calls_decoder: bool = False,
) -> Iterator[list[BaseModelOutput]]:
    """
    Within this context, the model's backbone is told of the layout and returns only what the head needs: what
    `for_head` makes of the hidden states `(1, T, H)`, or all of them. Gives a list with what the backbones return.

    With `swaps_inputs`, the backbone gets the flat tokens in place of those that the head was called with. With
    `calls_decoder`, the model's own forward is called, which may call the decoder within the backbone.
    """
    flat_model.prepare(batch)
    model, layout, backend = flat_model.model, batch.layout, flat_model.route.backend
    told = state_arguments(model.base_model, layout) if flat_model.carries_state else {}
    told["use_cache"] = False
    if "attention_mask" not in told:
        config = model.config.get_text_config()
        told["attention_mask"] = backbone_mask(backend, layout, config, model.dtype, flat_model.carries_state)
    if swaps_inputs:
        told |= {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    # The forward of some models (OPT) calls the decoder within the backbone that TRL's head calls
    backbones = list(dict.fromkeys((model.base_model, *([model.get_decoder()] if calls_decoder else []))))
    given: list[BaseModelOutput] = []

    def give_layout(module, args, kwargs):
        if swaps_inputs:  # some heads hand `input_ids` on by its place
            args, kwargs = (), {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        return args, {**kwargs, **told}

    def give_boundaries(module, args, kwargs):
        return args, {**kwargs, **boundaries(layout)}

    def give_head(module, args, outputs):
        if for_head is not None and not given:  # not again, where one of the backbones is within another
            outputs.last_hidden_state = for_head(outputs.last_hidden_state)
        given.append(outputs)
        return outputs

    with (
        features_in_order(model, batch),
        _explained_if_long(model, batch),
        _noise_of_rows(model, batch),
        ExitStack() as hooks,
    ):
        for backbone in backbones:
            hooks.enter_context(backbone.register_forward_pre_hook(give_layout, with_kwargs=True))
            hooks.enter_context(backbone.register_forward_hook(give_head))
        if backend == "positions":  # by transformers' own arguments, in place of a mask
            # A vision tower has boundaries of its own, and would take these
            for module in [model.get_decoder()] if takes_images(model) else backbones:
                hooks.enter_context(module.register_forward_pre_hook(give_boundaries, with_kwargs=True))
        yield given
    if not given:
        raise ValueError(
            f"The forward of {type(model).__name__} calls neither its `base_model` nor its decoder, so nothing tells "
            "its layers of the flat batch: call it with `fused_lm_head=True`, or set `padding_free=False`."
        )


def is_allocation_failure(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's own, or that of a library that it calls."""
    is_known = isinstance(error, RuntimeError) and _FAILURES.search(str(error)) is not None
    return isinstance(error, torch.OutOfMemoryError) or is_known


@contextmanager
def _explained_if_long(model: PreTrainedModel, batch: FlatBatch) -> Iterator[None]:
    """Within this context, what a model raises on a flat row that is longer than a row may be comes with the reason."""
    length, limits = batch.input_ids.size(1), architecture.position_limits(model)
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if not limits or length <= min(limits) or is_allocation_failure(error):
            raise
        raise ValueError(
            f"{type(model).__name__} cannot compute a flat row of {length} tokens, more than the {min(limits)} "
            f"positions of its configuration ({type(error).__name__}: {error}). Use smaller batches, in training also "
            f"`max_tokens_per_micro_batch={min(limits)}`, or set `padding_free=False`."
        ) from error


def _noise_of_rows(model: PreTrainedModel, batch: FlatBatch) -> AbstractContextManager[None]:
    """Within this context, NEFTune's noise has the size that it has in rows: it shrinks with the length of an axis."""
    embeddings = model.get_input_embeddings()
    if (alpha := vars(embeddings).get("neftune_noise_alpha")) is None:
        return nullcontext()
    in_rows = alpha * math.sqrt(batch.input_ids.size(1) / (batch.packed or batch.row_index.size(1)))
    return attributes_set([(embeddings, "neftune_noise_alpha", in_rows)])
