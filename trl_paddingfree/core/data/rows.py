"""Rows of a batch on the host, as collators give them, from which flat batches and their parts are built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..flat.batch import FlatBatch, Inputs
from .lengths import Example


@dataclass(frozen=True)
class CollatedRows:
    """
    The rows of a batch on the host, from which parts of it are made. They do not hold the `collator` that they came
    from: with a processor, it is larger than all the rows that a data loader's worker sends.
    """

    rows: Inputs  # the batch without its flat batch; values have one entry per row, per example, or for all
    num_items: int  # number of examples, or of what else is never divided

    def take(self, examples: Sequence[int], collator: Any) -> "CollatedRows":
        """The rows of some examples, padded as they are in the whole batch."""
        num_rows = len(self.rows["input_ids"])
        of_examples = [i + first for first in range(0, num_rows, self.num_items) for i in examples]
        # Keyed by the length of values with one entry per row, or per example
        entries = {num_rows: of_examples, self.num_items: list(examples)}

        def entries_of(value):
            is_list = isinstance(value, list)
            chosen = entries.get(len(value)) if is_list or torch.is_tensor(value) and value.ndim else None
            if chosen is None:
                return value
            return [value[i] for i in chosen] if is_list else value[chosen]

        return replace(self, rows={name: entries_of(x) for name, x in self.rows.items()}, num_items=len(examples))

    def alone(self, collator: Any) -> list[FlatBatch]:
        """A flat batch of each example on its own."""
        return [self.take([i], collator).with_flat(collator)["flat_batch"] for i in range(self.num_items)]

    def with_flat(self, collator: Any) -> Inputs:
        """The rows plus their flat batch."""
        return {**self.rows, "flat_batch": collator.flatten(self.rows)}


class ReadAs:
    """
    How the examples of a dataset become those that TRL's collator reads, and the rows of these a batch: here, both are
    the same. [`~trl_paddingfree.answers.collate.Examples`] writes prompts with several answers out as pairs.
    """

    def examples(self, examples: list[Example]) -> list[Example]:
        """The examples that TRL's collator reads."""
        return examples

    def rows(self, rows: CollatedRows, examples: list[Example]) -> CollatedRows:
        """The `rows` of what was read, with the `examples` of the dataset as the items that are never divided."""
        return rows


AS_THEY_ARE = ReadAs()


def documents_of(example: Example, cuts_packed: bool) -> list[Example]:
    """The documents of one example, each with its `input_ids` and `labels`."""
    ids = example["input_ids"]
    labels: Any = example.get("labels", ids)
    lengths = example["seq_lengths"] if cuts_packed and "seq_lengths" in example else [len(ids)]
    if len(labels) != len(ids) or sum(lengths) != len(ids):
        raise ValueError(
            f"An example has {len(ids)} `input_ids`, {len(labels)} `labels` and `seq_lengths` that sum to "
            f"{sum(lengths)}: all three must be the same."
        )
    spans = [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
    return [{**example, "input_ids": ids[span], "labels": labels[span]} for span in spans]
