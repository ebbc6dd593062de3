"""Padded rows that others made: which of them a flat batch can hold."""

from dataclasses import replace
from typing import Any

import torch

from .batch import IGNORE_INDEX, FlatBatch

# Rows are compared by numbers that hold a token id (low bits) and how many positions were skipped before it in its row
_TOKEN_BITS = 32
_TOKEN = 2**_TOKEN_BITS - 1


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
