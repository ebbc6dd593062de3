"""Rows of a batch on the host, collated or generated, of which flat batches and their parts are made."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs, row_spans
from .lengths import Example

if TYPE_CHECKING:
    from ..images.rows import RowImages
    from .collate import FlatCollator


@dataclass(frozen=True)
class CollatedRows:
    """The rows of a batch on the host, from which parts of it are made."""

    collator: "FlatCollator"  # that gave the batch; no longer there once a worker of the data loader has sent it
    rows: Inputs  # the batch without its flat batch: values of one entry per row, per example, or for all
    num_items: int  # examples, which are not divided

    def __getstate__(self) -> dict[str, object]:
        # The trainer has the collator: with a processor, it is larger than all rows
        return {name: value for name, value in vars(self).items() if name != "collator"}

    def row_numbers(self, examples: Sequence[int]) -> list[int]:
        """The rows of some examples."""
        return [i + first for first in range(0, len(self.rows["input_ids"]), self.num_items) for i in examples]

    def take(self, examples: Sequence[int]) -> "CollatedRows":
        """The rows of some examples, as wide as all."""
        numbers = {len(self.rows["input_ids"]): self.row_numbers(examples), self.num_items: list(examples)}

        def taken(value: object) -> object:
            if isinstance(value, torch.Tensor) and value.ndim and len(value) in numbers:
                return value[numbers[len(value)]]
            if isinstance(value, list) and len(value) in numbers:
                return [value[i] for i in numbers[len(value)]]
            return value

        return replace(self, rows={name: taken(x) for name, x in self.rows.items()}, num_items=len(examples))

    def alone(self) -> list[FlatBatch]:
        """The flat batch of each example alone."""
        return [self.take([i]).with_flat()["flat_batch"] for i in range(self.num_items)]

    def with_flat(self, reach: int | None = None) -> Inputs:
        """The batch of these rows; see [`~trl_paddingfree.FlatBatch.from_rows`] for `reach`."""
        return {**self.rows, "flat_batch": self.collator.flatten(self.rows, reach)}

    def batch(self) -> Inputs:
        """The batch of these rows, with them under `"rows"`."""
        return {**self.with_flat(), "rows": self}


@dataclass(frozen=True)
class GeneratedRows:
    """Rows with prompts padded on the left and completions on the right, on the host."""

    input_ids: torch.Tensor  # (R, L) int64
    attention_mask: torch.Tensor  # (R, L) int64
    labels: torch.Tensor  # (R, L) int64: each token again where it is scored, else -100
    lengths: Sequence[int]  # of each row
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
        return cls(ids, mask, targets, lengths, options)

    def batch(self, reach: int | None = None) -> FlatBatch:
        """The flat batch of the rows; see [`~trl_paddingfree.FlatBatch.from_rows`] for `reach`."""
        return FlatBatch.from_padded(self.input_ids, self.attention_mask, self.labels, reach=reach, **self.options)


@dataclass
class PromptGroups:
    """Gives the flat batch of prompts with unknown completions, equally long and all different, for predictions."""

    prefix_sharing: bool = True
    num_generations: int = 8
    max_completion_length: int = 256

    def __call__(self, examples: list[Example]) -> Inputs:
        return {"flat_batch": self.flatten([example["prompt_ids"] for example in examples])}

    def flatten(self, prompts: Sequence[Sequence[int]], images: "RowImages | None" = None) -> FlatBatch:
        """The flat batch of the groups of some prompts, whose `images` are those of each."""
        tokens = count(2**40)  # which no prompt has
        grown = [prompt for prompt in prompts for _ in range(self.num_generations)]
        rows = [[*prompt, *islice(tokens, self.max_completion_length)] for prompt in grown]
        if images is not None:
            images = replace(images, sources=[x for x in images.sources for _ in range(self.num_generations)])
        nothing = [[IGNORE_INDEX] * len(row) for row in rows]
        return FlatBatch.from_rows(rows, nothing, prefix_sharing=self.prefix_sharing, images=images)
