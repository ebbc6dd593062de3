"""Rows that others have padded: which of them a flat batch can hold, and how these become flat."""

import inspect
from dataclasses import replace
from typing import Any

import torch

from .core.flat.batch import IGNORE_INDEX, FlatBatch

# Rows are compared by numbers that hold a token id (low bits) and how many positions were skipped before it in its row
_TOKEN_BITS = 32
_TOKEN = 2**_TOKEN_BITS - 1


def row_starts(attention_mask: torch.Tensor) -> torch.Tensor:
    """`(R,)` int64: where each row of an `(R, L)` mask begins. Padding between the tokens of a row is refused."""
    mask = (attention_mask != 0).int()
    begins = torch.nn.functional.pad(mask, (1, 0)).diff() > 0
    gaps = begins.sum(1) > 1
    if gaps.any():
        raise ValueError(
            f"Row {int(gaps.int().argmax())} of `attention_mask` has padding between its tokens, and a flat batch "
            "has no place for it: pad rows only on the left and on the right, or set `padding_free=False`."
        )
    return mask.argmax(1)


def counts_by_mask(model: torch.nn.Module) -> bool:
    """Whether positions, if not given, are counted from the first token of a row (as in OPT), not by column."""
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return any("attention_mask" in inspect.signature(x.forward).parameters for x in embeddings)


def default_positions(attention_mask: torch.Tensor, by_mask: bool) -> torch.Tensor:
    """
    `(R, L)` int64: the positions that a model gives to padded rows without `position_ids`, by column or, if it counts
    `by_mask`, from the first token of each row.
    """
    counted = attention_mask if by_mask else torch.ones_like(attention_mask)
    return (counted.cumsum(1) - 1) * counted


def jumps(position_ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """`(R,)` bool: whether the positions of a row do not count its `real` tokens up one by one, from 0 or above."""
    within = (position_ids.diff() != 1) & real[:, 1:] & real[:, :-1]
    return within.any(1) | ((position_ids < 0) & real).any(1)


def scores_padding(labels: torch.Tensor, real: torch.Tensor, moves: bool = True) -> torch.Tensor:
    """
    `(R,)` bool: whether labels of a row score padding, or, if each is the label of the token before (`moves`), have
    padding predict a token. What a model computes for padding is no result, and depends on how it is computed.
    """
    scored = labels != IGNORE_INDEX
    found = (scored & ~real).any(1)
    return found | (scored[:, 1:] & ~real[:, :-1]).any(1) if moves else found


def flattened_at(
    position_ids: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor | None = None,
    **options: Any,
) -> FlatBatch:
    """
    [`FlatBatch.from_padded`] of rows whose tokens have `position_ids` of their own, `(R, L)` int64, which increase
    along each row. Rows share only tokens at equal positions.
    """
    real = attention_mask != 0
    counted = real.cumsum(1) - 1
    skipped = ((position_ids - counted) << _TOKEN_BITS).masked_fill(~real, 0)
    labels = torch.full_like(input_ids, IGNORE_INDEX) if labels is None else labels
    targets = torch.where(labels < 0, labels, labels + skipped)
    batch = FlatBatch.from_padded(input_ids + skipped, attention_mask, targets, **options)
    tokens, next_tokens = batch.input_ids, batch.shift_labels
    return replace(
        batch,
        input_ids=tokens & _TOKEN,
        position_ids=batch.position_ids + (tokens >> _TOKEN_BITS),
        shift_labels=torch.where(next_tokens < 0, next_tokens, next_tokens & _TOKEN),
    )
