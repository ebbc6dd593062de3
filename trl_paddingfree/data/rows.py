"""The rows of a batch, kept on the host: parts are made of them when it does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class CollatedRows:
    """The rows of a batch on the host, from which parts of it are made."""

    collator: Any  # the `FlatCollator` that gave the batch
    rows: dict[str, Any]  # the batch without its flat batch: values of one entry per row, per example, or for all
    num_examples: int

    def row_numbers(self, examples: Sequence[int]) -> list[int]:
        """The rows of some examples."""
        return [i + first for first in range(0, len(self.rows["input_ids"]), self.num_examples) for i in examples]

    def take(self, examples: Sequence[int]) -> "CollatedRows":
        """The rows of some examples, as wide as all."""
        numbers = {len(self.rows["input_ids"]): self.row_numbers(examples), self.num_examples: list(examples)}

        def taken(value: Any) -> Any:
            has_entries = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
            if not has_entries or len(value) not in numbers:
                return value
            index = numbers[len(value)]
            return [value[i] for i in index] if isinstance(value, list) else value[index]

        return replace(self, rows={name: taken(x) for name, x in self.rows.items()}, num_examples=len(examples))

    def tokens(self) -> list[int]:
        """Tokens to compute of each example alone."""
        alone = [self.take([i]).rows for i in range(self.num_examples)]
        return [self.collator.flatten(rows).counts.computed for rows in alone]

    def images(self) -> dict[str, Any]:
        """What belongs to images, of those of these rows."""
        return {}

    def batch(self, reach: int | None = None) -> dict[str, Any]:
        """The batch of these rows, with them under `"rows"`."""
        return {**self.rows, "flat_batch": self.collator.flatten(self.rows, reach), "rows": self}
