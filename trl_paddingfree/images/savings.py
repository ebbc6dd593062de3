"""What padding wastes and sharing saves on data with images, counted in tokens of the processor's rows."""

from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.fingerprint import Hasher

from ..core.data.collate import FlatCollator
from ..core.data.task import Task
from ..core.flat.batch import IGNORE_INDEX, FlatBatch
from ..core.flat.counts import Counted
from .collate import of_images, vision_collator
from .examples import prompt_in_messages


def image_counts(
    token_id: int, dataset: Dataset, processor: Any, task: Task, max_length: int | None, options: dict[str, Any]
) -> Counted:
    """Count examples with images, prepared by the model's `processor`, with `token_id` as the placeholder."""
    only_completion = {"completion_only_loss": "completion" in dataset.column_names} if task.name == "sft" else {}
    collator = vision_collator(task)(processor, padding_free=True, **only_completion)
    # Of tasks that generate, the collator makes stand-ins for completions
    groups: Any = None if issubclass(task.collator, FlatCollator) else task.make_collator(**options)
    lengths, prepared = [], []
    numbers: dict = {}  # by the hash of images
    for example in dataset:
        if groups is None:
            batch = collator.rows([example])
        else:
            batch = processor.apply_chat_template(
                [prompt_in_messages(example)["messages"]],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            batch["labels"] = batch["input_ids"]
        ids, labels, masks = batch["input_ids"], collator.row_labels(batch), batch["attention_mask"].bool()
        # Placeholders of equal images, and of no others, become the same tokens, so that rows share them
        number = numbers.setdefault(Hasher.hash(of_images(batch)), 1 + len(numbers))
        marks = ids == token_id
        ids = torch.where(marks, -(2**32) * number - marks.cumsum(1), ids)
        labels = ids.masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
        lengths.append(masks.sum(1).tolist())
        prepared.append(
            [[row[mask][:max_length].tolist() for row, mask in zip(x, masks, strict=True)] for x in (ids, labels)]
        )

    def count(index):
        # The first row of each example, then the second of each
        rows, labels = ([*chain(*zip(*x, strict=True))] for x in zip(*(prepared[i] for i in index), strict=True))
        return (FlatBatch.from_rows(rows, labels) if groups is None else groups.flatten(rows)).counts

    return len(prepared), np.array(lengths), count  # TRL drops no examples with images
