"""Rows that a trainer generates: on the host, where flat batches are made of them, and in micro-batches by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from trl.trainer.utils import split_tensor_dict

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs, RowPart, row_spans


@dataclass(frozen=True)
class GeneratedRows:
    """Rows with prompts padded on the left and completions on the right, on the host."""

    input_ids: torch.Tensor  # (R, L) int64
    labels: torch.Tensor  # (R, L) int64: each token again where it is scored, else -100
    starts: Sequence[int]  # of each row, the column in which it begins
    lengths: Sequence[int]
    options: dict[str, Any]  # of [`~trl_paddingfree.FlatBatch.from_padded`]

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> "GeneratedRows":
        """Those of a call of the model, on whatever device. Refuses a completion without a prompt."""
        # One copy: each waits for the device
        ids, mask, targets = torch.stack([input_ids, attention_mask.long(), labels]).cpu()
        starts, lengths = row_spans(mask)
        firsts = targets.gather(1, torch.tensor(starts)[:, None])[:, 0]
        for row, start in enumerate(starts):
            if start and lengths[row] and firsts[row] != IGNORE_INDEX:
                raise ValueError(
                    f"Row {row} has a completion and no prompt: TRL would predict its first token from padding. Leave "
                    "out empty prompts, or set `padding_free=False`."
                )
        return cls(ids, targets, starts, lengths, options)

    @cached_property
    def order(self) -> list[int]:
        """The rows, those of one prompt side by side: asked for by parts only."""
        spans = [slice(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]
        rows = [(ids[span], labels[span]) for ids, labels, span in zip(self.input_ids, self.labels, spans, strict=True)]
        return _by_key([ids[labels == IGNORE_INDEX].numpy().tobytes() for ids, labels in rows])

    @property
    def num_items(self) -> int:
        """Rows."""
        return len(self.lengths)

    def tokens(self) -> list[int]:
        """Tokens of each row, those of one prompt side by side."""
        return [self.lengths[row] for row in self.order]

    def batch(self, rows: Sequence[int] | None = None, reach: int | None = None) -> FlatBatch:
        """The flat batch of some rows, or of all, with positions that tell of `reach` tokens."""
        rows = range(len(self.lengths)) if rows is None else rows
        lengths, starts = ([values[row] for row in rows] for values in (self.lengths, self.starts))
        ids, labels = self.input_ids[list(rows)], self.labels[list(rows)]
        return FlatBatch.from_padded(ids, labels, lengths, starts, reach=reach, **self.options)

    def part(self, items: Sequence[int], reach: int | None) -> RowPart:
        """The part of a batch that some rows make, by their places in [`GeneratedRows.tokens`]."""
        rows = [self.order[item] for item in items]
        return RowPart(torch.tensor(rows), self.batch(rows, reach))


def _by_key(keys: Sequence[bytes]) -> list[int]:
    """The places of `keys`, equal ones side by side."""
    return sorted(range(len(keys)), key=keys.__getitem__)


def by_prompt(batches: list[Inputs]) -> list[Inputs]:
    """
    The rows of some micro-batches of one width, those of one prompt together, in micro-batches of the same size. As TRL
    keeps them, these hold tensors and lists of one entry per row, and values that all rows have in common.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = [row.tobytes() for row in whole["prompt_ids"].cpu().numpy()]
    order = _by_key(prompts)

    def ordered(value):
        if isinstance(value, torch.Tensor) and value.ndim:
            return value[order]
        return [value[row] for row in order] if isinstance(value, list) else value

    return split_tensor_dict({name: ordered(value) for name, value in whole.items()}, len(batches))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].ndim:
        return torch.cat(values)
    return [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]
