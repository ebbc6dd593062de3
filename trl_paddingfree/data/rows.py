"""Rows of a batch on the host, collated or generated, of which flat batches and their parts are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.trainer.utils import split_tensor_dict

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs, row_spans
from .lengths import Example

if TYPE_CHECKING:
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

    def loads(self, load: Callable[[FlatBatch], np.ndarray]) -> list[np.ndarray]:
        """The `load` of each example alone."""
        return list(map(load, self.alone()))

    def with_flat(self, reach: int | None = None) -> Inputs:
        """The batch of these rows, with positions that tell of `reach` tokens."""
        return {**self.rows, "flat_batch": self.collator.flatten(self.rows, reach)}

    def batch(self, reach: int | None = None) -> Inputs:
        """The batch of these rows, with them under `"rows"`."""
        return {**self.with_flat(reach), "rows": self}


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
        """The flat batch of the rows, with positions that tell of `reach` tokens."""
        return FlatBatch.from_padded(self.input_ids, self.attention_mask, self.labels, reach=reach, **self.options)


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


@dataclass
class PromptGroups:
    """Gives the flat batch of prompts with unknown completions, equally long and all different, for predictions."""

    prefix_sharing: bool = True
    num_generations: int = 8
    max_completion_length: int = 256

    def __call__(self, examples: list[Example]) -> Inputs:
        tokens, prompts = count(-1, -1), [x["prompt_ids"] for x in examples for _ in range(self.num_generations)]
        rows = [[*prompt, *islice(tokens, self.max_completion_length)] for prompt in prompts]
        nothing = [[IGNORE_INDEX] * len(row) for row in rows]
        return {"flat_batch": FlatBatch.from_rows(rows, nothing, prefix_sharing=self.prefix_sharing)}
