"""What padding wastes on data with images, whose tokens only the model's processor can count."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from ..flat.batch import IGNORE_INDEX, BatchCounts, FlatBatch
from ..flat.images import RowImages
from .images import images_key
from .task import Task


@dataclass(frozen=True)
class ImageRows:
    """
    The rows of one example, after its images have become tokens.

    Args:
        rows (`list[np.ndarray]`):
            Their tokens: one row for SFT, two for DPO.
        labels (`list[np.ndarray]`):
            The token itself where it is scored, else -100.
        key (`str`):
            What its images have in common with equal ones.
    """

    rows: list[np.ndarray]
    labels: list[np.ndarray]
    key: str

    def cut(self, max_length: int | None) -> "ImageRows":
        """The rows truncated."""
        rows, labels = ([x[:max_length] for x in one] for one in (self.rows, self.labels))
        return ImageRows(rows, labels, self.key)

    @property
    def teaches(self) -> bool:
        """Whether anything is scored."""
        return any((labels[1:] != IGNORE_INDEX).any() for labels in self.labels)


def image_rows(dataset: Dataset, processor: Any, task: Task) -> list[ImageRows]:
    """
    Process each example once, by TRL's collator.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows in one of TRL's formats, with images.
        processor ([`~transformers.ProcessorMixin`]):
            The model's processor.
        task ([`Task`]):
            What the data is for.
    """
    only_completion = {"completion_only_loss": "completion" in dataset.column_names} if task.name == "sft" else {}
    vision_collator: Any = task.vision_collator
    collator = vision_collator(processor, padding_free=True, **only_completion)
    found = []
    for example in dataset:
        batch = collator.rows([example])
        masks, labels = batch["attention_mask"].bool(), collator.row_labels(batch)
        rows, targets = (
            [row[mask].numpy() for row, mask in zip(x, masks, strict=True)] for x in (batch["input_ids"], labels)
        )
        found.append(ImageRows(rows, targets, images_key(example)))
    return found


def count_image_batches(
    examples: Sequence[ImageRows], token_id: int, batch_size: int, seed: int
) -> Iterator[BatchCounts]:
    """
    Lay out one epoch of batches, drawn at random as in training, and count.

    Args:
        examples (`Sequence[ImageRows]`):
            From [`image_rows`], truncated.
        token_id (`int`):
            The model's placeholder token.
        batch_size (`int`):
            Examples per batch.
        seed (`int`):
            Seed of the order.
    """
    order = np.random.default_rng(seed).permutation(len(examples))
    for start in range(0, len(order), batch_size):
        batch = [examples[i] for i in order[start : start + batch_size]]
        copies = len(batch[0].rows)
        names: dict[str, int] = {}
        groups = [names.setdefault(example.key, len(names)) for example in batch]
        yield FlatBatch.from_rows(
            [example.rows[copy] for copy in range(copies) for example in batch],
            [example.labels[copy] for copy in range(copies) for example in batch],
            images=RowImages(token_id, groups * copies, copies),
        ).counts


def counter(
    dataset: Dataset, processor: Any, task: Task, max_length: int | None, token_id: int, seed: int
) -> tuple[list[ImageRows], list[list[int]], Callable[[int], Iterable[BatchCounts]]]:
    """
    What [`~trl_paddingfree.data.savings.measure`] needs of data with images.

    Returns:
        The examples that are left, the lengths of all rows before truncation, and the counts by batch size.
    """
    whole = image_rows(dataset, processor, task)
    lengths = [[len(row) for row in example.rows] for example in whole]
    left = [cut for example in whole if (cut := example.cut(max_length)).teaches]
    return left, lengths, lambda batch_size: count_image_batches(left, token_id, batch_size, seed)
