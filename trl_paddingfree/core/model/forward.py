"""Between TRL's call of a model and its backbone: rows in, flat through the model, rows out.

TRL's trainers call `model(input_ids=rows, ..., labels=rows, fused_lm_head=True)` and read one float per token, or
`model(input_ids=rows, ...)` with a pooled head and read one float per row. With a `flat_batch` among the arguments, the
model computes the flat tokens instead, and answers in the same rows. The collator puts the `flat_batch` beside the
rows, and TRL passes it on, as all keys of a batch that its losses do not read (DPO: `model_kwargs`, SFT: `**inputs`).
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from . import architecture
from .attention import boundaries
from .hooks import Answered, Compute
from .restored import Change, attributes_set
from .told import PassContext

if TYPE_CHECKING:
    from trl.trainer.utils import FusedCausalLMOutput

    from .flat_model import FlatModel

# Fields of TRL's head with one value per scored token
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# The attribute of embeddings that holds the strength of NEFTune's noise
NOISE = "neftune_noise_alpha"
# Arguments for padded rows, which the flat batch replaces; TRL passes the margins of pairs to the backbone
_ROW_ARGUMENTS = ("attention_mask", "position_ids", "margin", *architecture.TYPE_ROWS)
# Packages that a model's own forward runs through, besides the one that defines its class
_LIBRARIES = (
    __name__.partition(".")[0],
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "contextlib",
    "functools",
)
# Messages of the RuntimeErrors by which libraries that PyTorch calls report a failed allocation
_FAILURES = re.compile(r"can't allocate memory|out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED", re.IGNORECASE)


def is_pooled(model: PreTrainedModel) -> bool:
    """Whether the head of `model` reads one token per row, as in sequence classification, and scores no tokens."""
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
    `(R, L, vocabulary)`, 0 beyond the end of each row, with the loss if there are `labels`, and with all else that its
    head answers of each token.
    """
    other_arguments: Inputs = {name: value for name, value in kwargs.items() if name not in _ROW_ARGUMENTS}
    if other_arguments.get("pixel_values") is not None and not any("pixel_values" in x.takes for x in batch.hooks):
        raise ValueError(
            "The call has `pixel_values`, and its flat batch knows of no images: have TRL's pass call the model, which "
            "says whose they are, or set `padding_free=False`."
        )
    given = {} if labels is None else {"labels": labels}
    if flat_model.is_pooled:
        assert input_ids is not None
        return _pooled(flat_model, batch, input_ids, other_arguments | given)
    if not fused_lm_head:
        with flat_backbone(flat_model, batch, batch.tokens_to_rows, calls_decoder=True):  # losses read rows
            outputs = flat_model.forwards[-1](**given, **flat_inputs(flat_model, batch, other_arguments))
        answers = {name: outputs[name] for name in ("loss", "aux_loss") if name in outputs}
        for name, x in dict.items(outputs):  # logits, and what a head answers beside them
            if torch.is_tensor(x) and x.shape[:2] == batch.row_mask.shape:
                answers[name] = x.masked_fill(~batch.row_mask.to(x.device).view(*x.shape[:2], *[1] * (x.ndim - 2)), 0)
        return type(outputs)(**answers)
    assert labels is not None
    return scored_in_rows(flat_model, batch, labels, other_arguments)


def scored_in_rows(
    flat_model: "FlatModel", batch: FlatBatch, labels: torch.Tensor, other_arguments: Inputs
) -> "FusedCausalLMOutput":
    """
    The output of TRL's fused head, in rows, for a batch from `begin_pass` and the `other_arguments` of the call: its
    [`~trl.trainer.utils.FusedCausalLMOutput`] with fields of shape `(R, L-1)`, 0 except where `labels` are scored, and
    the loss that padded rows would give.
    """
    compute: Compute = partial(_scored, flat_model, other_arguments)
    for hook in flat_model.hooks:
        compute = partial(hook.scored, flat_model, compute=compute)
    output, _ = compute(batch)
    values = {name: output[name] for name in PER_TOKEN if name in output}
    label_mask = (labels[:, 1:] != IGNORE_INDEX).to(values["log_probs"].device)
    in_rows = {name: batch.scored_to_rows(x).masked_fill(~label_mask, 0) for name, x in values.items()}
    num_items = other_arguments.get("num_items_in_batch")
    # For callers that want the model's own loss: most TRL trainers compute theirs from the values in rows
    loss = -in_rows["log_probs"].sum() / (label_mask.sum().clamp(min=1) if num_items is None else num_items)
    if output.aux_loss is not None:
        share = architecture.config_value(flat_model.model.config.get_text_config(), "router_aux_loss_coef")
        loss = loss + (share or 0.0) * output.aux_loss
    return replace(output, **in_rows, label_mask=label_mask, loss=loss)


def _scored(flat_model: "FlatModel", other_arguments: Inputs, batch: FlatBatch) -> Answered:
    """What TRL's head answers for the scored tokens of a batch, in the chunks of its schedule: see [`Answered`]."""
    size = batch.schedule.head_chunk or batch.shift_labels.size(1)
    chunks: list[torch.Tensor] = []
    outputs = []

    def first_chunk(hidden: torch.Tensor) -> torch.Tensor:
        scored = batch.scored_of(hidden)
        chunks.extend(scored.split(size, 1) if size < scored.size(1) else [scored])
        return chunks[0]

    head = partial(flat_model.forwards[-1], **flat_inputs(flat_model, batch, other_arguments), fused_lm_head=True)
    first, *others = batch.shift_labels.split(size, 1)
    with flat_backbone(flat_model, batch, first_chunk) as answers:
        outputs.append(head(shift_labels=first))
        for hidden, targets in zip(chunks[1:], others, strict=True):
            answer = BaseModelOutput(last_hidden_state=hidden)
            with attributes_set([(flat_model.model.base_model, "forward", lambda answer=answer, **_: answer)]):
                # The first chunk's call has returned the router loss of all tokens
                outputs.append(head(shift_labels=targets, output_router_logits=False))
    values = {name: torch.cat([x[name] for x in outputs], 1) for name in PER_TOKEN if name in outputs[0]}
    return replace(outputs[0], **values), answers[0]


def flat_inputs(flat_model: "FlatModel", batch: FlatBatch, others: Inputs) -> Inputs:
    """The arguments of a call of the model: flat tensors, and `others`."""
    # Not a mask: the number of rows that contain each token, its weight in TRL's router loss. A hook gives the backbone
    # the real mask
    flat = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "attention_mask": batch.token_rows}
    inputs: Inputs = others | flat
    for hook in (*batch.hooks, *flat_model.hooks):
        inputs = hook.inputs(flat_model, batch, inputs)
    return inputs


def _pooled(flat_model: "FlatModel", batch: FlatBatch, input_ids: torch.Tensor, arguments: Inputs) -> ModelOutput:
    """
    The output of a head that reads one token of each row.

    transformers finds that token by its id, not by the mask: the last one that is not the padding token, or else the
    first. If a row ends in its padding token (pad = eos), the head reads the token before it, as it does with padding.
    """
    if batch.empty_rows:
        raise ValueError(f"{batch.empty_rows} of {len(batch.row_mask)} rows have no token to read: leave them out.")
    is_token = (input_ids != flat_model.model.config.get_text_config().pad_token_id) & batch.row_mask
    last = (torch.arange(input_ids.size(1), device=input_ids.device) * is_token).argmax(1, keepdim=True)
    positions = batch.row_index.gather(1, last)

    def read(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.squeeze(0)[positions.to(hidden.device)]

    inputs = flat_inputs(flat_model, batch, arguments)
    flat = {name: inputs.pop(name) for name in ("input_ids", "position_ids", "attention_mask")}
    with flat_backbone(flat_model, batch, read, swapped=flat):
        return flat_model.forwards[-1](**inputs, input_ids=input_ids.gather(1, last))


@contextmanager
def layout_arguments(flat_model: "FlatModel", batch: FlatBatch) -> Iterator[Inputs]:
    """
    Within this context, a backbone may compute a batch by its schedule. Yields the backbone's arguments that carry
    the layout: in most routes, a mask.
    """
    model, layout, backend = flat_model.model, batch.layout, flat_model.route.backend
    context, hooks = PassContext(layout), (*batch.hooks, *flat_model.hooks)
    for hook in hooks:
        context = hook.context(context)
    arguments: Inputs = {"use_cache": False, **flat_model.mixers.arguments(model, backend, context)}

    def give_boundaries(module, args, kwargs):
        return args, {**kwargs, **boundaries(layout)}

    with ExitStack() as contexts:
        changes: list[Change] = [change for hook in hooks for change in hook.changes(flat_model, batch)]
        embeddings = model.get_input_embeddings()
        # NEFTune divides its noise by the square root of the row length: use that of the padded rows, not the flat one
        if (alpha := vars(embeddings).get(NOISE)) is not None:
            row_alpha = alpha * math.sqrt(batch.input_ids.size(1) / (batch.packed_length or batch.row_index.size(1)))
            changes.append((embeddings, NOISE, row_alpha))
        if changes:
            contexts.enter_context(attributes_set(changes))
        if backend == "positions":  # by transformers' own arguments, in place of a mask
            if architecture.takes_images(model):  # past the vision tower, which would take them as its own
                contexts.enter_context(
                    architecture.decoder_of(model).register_forward_pre_hook(give_boundaries, with_kwargs=True)
                )
            else:
                arguments |= boundaries(layout)
        try:
            yield arguments
        except (IndexError, RuntimeError, ValueError) as error:
            if explained := _explained(model, batch, error):
                raise ValueError(explained) from error
            raise


@contextmanager
def flat_backbone(
    flat_model: "FlatModel",
    batch: FlatBatch,
    for_head: Callable[[torch.Tensor], torch.Tensor] | None,
    calls_decoder: bool = False,
    swapped: Inputs | None = None,
) -> Iterator[list[BaseModelOutput]]:
    """
    Within this context, the model's backbone knows the layout and returns only what the head needs: `for_head` of the
    hidden states `(1, T, H)`, or all of them if `None`. Yields a list that collects what the backbones return.

    Set `calls_decoder` if the model's own forward is called, which may call the decoder inside the backbone. `swapped`
    overrides arguments that the head passes to the backbone.
    """
    model = flat_model.model
    # The forward of some models (OPT) calls the decoder within the backbone that TRL's head calls
    backbones = {model.base_model, architecture.decoder_of(model) if calls_decoder else model.base_model}
    answers: list[BaseModelOutput] = []

    def give_head(module, args, outputs):
        # Only once: backbones may be nested, and are called again for each chunk of scored tokens
        if for_head is not None and not answers:
            outputs.last_hidden_state = for_head(outputs.last_hidden_state)
        answers.append(outputs)
        return outputs

    with layout_arguments(flat_model, batch) as arguments, ExitStack() as registered:

        def give_layout(module, args, kwargs):
            if args:  # some heads pass `input_ids` by position
                kwargs = architecture.by_name(module.forward, args, kwargs)
            return (), {**kwargs, **(swapped or {}), **arguments}

        for backbone in backbones:
            registered.enter_context(backbone.register_forward_pre_hook(give_layout, with_kwargs=True))
            registered.enter_context(backbone.register_forward_hook(give_head))
        yield answers
    if not answers:
        raise ValueError(
            f"The forward of {type(model).__name__} calls neither its `base_model` nor its decoder, so its layers "
            "do not learn of the flat batch: call it with `fused_lm_head=True`, or set `padding_free=False`."
        )


def is_allocation_failure(error: BaseException) -> bool:
    """Whether an error of PyTorch, or of a library that it calls, says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _FAILURES.search(str(error)) is not None
    )


def _explained(model: PreTrainedModel, batch: FlatBatch, error: Exception) -> str:
    """What explains the error that a model raised on a flat row that exceeds its position limit; empty otherwise."""
    length, limits = batch.input_ids.size(1), architecture.position_limits(model)
    if not limits or length <= min(limits) or is_allocation_failure(error):
        return ""
    packages = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    if packages - {*_LIBRARIES, type(model).__module__.partition(".")[0]}:
        return ""  # from the user's own hook
    return (
        f"{type(model).__name__} cannot compute a flat row of {length} tokens, more than the {min(limits)} positions "
        f"of its configuration ({type(error).__name__}: {error}). Use smaller batches, in training also "
        f"`max_tokens_per_micro_batch={min(limits)}`, or set `padding_free=False`."
    )
