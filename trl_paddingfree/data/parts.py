"""Batches in parts: cut by the collator, or by the trainer at run time, from the examples that a batch was made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..batching.budget import split_by_tokens


def collate_parts(
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]], examples: list[dict[str, Any]], max_tokens: int | None
) -> dict[str, Any]:
    """One batch of all examples; if it has more than `max_tokens` tokens, with its `"parts"` that do not."""
    whole = collate(examples)
    if max_tokens is None or whole["flat_batch"].counts.computed <= max_tokens:
        return whole
    tokens = [collate([example])["flat_batch"].counts.computed for example in examples]
    parts = split_by_tokens(tokens, max_tokens)
    whole["parts"] = [collate([examples[i] for i in part]) for part in parts]
    return whole


@dataclass(frozen=True)
class Examples:
    """
    What a batch was made of, beside it: the trainer decides at run time whether to split it.

    Args:
        collator (`Callable`):
            What made the batch.
        examples (`list[dict[str, Any]]`):
            Its examples.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    examples: list[dict[str, Any]]

    def batch(self) -> dict[str, Any]:
        """The batch, with these examples under `"examples"`."""
        return {**self.collator(self.examples), "examples": self}

    def split(self, max_tokens: int) -> list[dict[str, Any]]:
        """Batches of at most `max_tokens` tokens, or of one example."""
        tokens = [self.collator([example])["flat_batch"].counts.computed for example in self.examples]
        parts = split_by_tokens(tokens, max_tokens)
        return [Examples(self.collator, [self.examples[i] for i in part]).batch() for part in parts]


@dataclass(frozen=True)
class KeepingExamples:
    """
    A collator whose batches have the [`Examples`] that they were made of.

    Args:
        collator (`Callable`):
            A collator that gives flat batches.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return Examples(self.collator, examples).batch()
