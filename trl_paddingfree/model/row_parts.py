"""Rows that a model computes in parts, one after another, with the gradients of the whole.

The loss is the caller's, over all rows. Each part keeps nothing between its forward and its backward pass, which
computes it again: a loss that couples rows is as exact as any other. The last part is the first to have its backward
pass, and keeps what it computed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from .. import upstream
from ..flat.batch import FlatBatch, RowPart
from .forward import PER_TOKEN, ROW_ARGUMENTS, scored_in_rows, with_loss

if TYPE_CHECKING:
    from .flat_model import FlatModel


def forward_in_parts(
    flat: "FlatModel",
    batch: FlatBatch,
    *,
    labels: torch.Tensor | None = None,
    fused_lm_head: bool = False,
    **kwargs: Any,
) -> Any:
    """
    The answer of a model to rows that it computes in parts.

    Args:
        flat ([`~trl_paddingfree.model.flat_model.FlatModel`]):
            The model.
        batch ([`~trl_paddingfree.FlatBatch`]):
            The rows, with their parts.
        labels (`torch.Tensor` of shape `(R, L)`, int64):
            The tokens to score.
        fused_lm_head (`bool`):
            Whether TRL's head answers. Logits of rows would not fit in parts either.
        **kwargs:
            Arguments beside the rows.

    Returns:
        [`~trl.trainer.utils.FusedCausalLMOutput`] of all rows, in their order.

    Raises:
        `ValueError`: If the head is another one.
    """
    if not fused_lm_head or labels is None:
        raise ValueError(
            "A micro-batch that does not fit into its budget runs in parts beneath the loss, and there the model must "
            "be called with `labels` and `fused_lm_head=True`: do so, or leave `memory_budget` and "
            "`max_tokens_per_micro_batch` out."
        )
    kwargs = {name: value for name, value in kwargs.items() if name not in ROW_ARGUMENTS}

    # The labels are an argument of what is checkpointed: by their device it finds the random state to come back to
    def answer(part: RowPart, labels: torch.Tensor) -> Any:
        flat.prepare(part.batch)
        return scored_in_rows(flat, part.batch, {**kwargs, **part.arguments})

    *first, last = batch.parts
    answers = [checkpoint(answer, part, labels, use_reentrant=False) for part in first] + [answer(last, labels)]
    outputs, routers = zip(*answers, strict=True)
    order = torch.cat([part.rows for part in batch.parts]).argsort()

    def joined(name: str) -> torch.Tensor | None:
        values = [getattr(output, name) for output in outputs]
        return None if values[0] is None else torch.cat(values)[order]

    whole = replace(outputs[0], **{name: joined(name) for name in PER_TOKEN})
    if routers[0] is not None:  # the loss of routers is one of all tokens together
        layers = tuple(map(torch.cat, zip(*routers, strict=True)))
        weights = torch.cat([part.batch.token_rows for part in batch.parts], 1)
        whole = replace(whole, aux_loss=upstream.router_loss(flat.model, layers, weights))
    return with_loss(flat.model, whole, labels, kwargs.get("num_items_in_batch"))
