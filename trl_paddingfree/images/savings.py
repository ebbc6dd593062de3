"""What padding wastes on data with images, and what sharing saves: counted in tokens, of rows from the processor."""

from itertools import chain
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from ..data.rows import PromptGroups
from ..data.savings import Counted
from ..data.task import Task
from ..flat.batch import FlatBatch
from ..flat.counts import BatchCounts
from .collate import of_images
from .cuts import sources_of
from .examples import prompt_in_messages
from .rows import RowImages, VisionRules


def image_counts(
    token_id: int, dataset: Dataset, processor: Any, task: Task, max_length: int | None, options: dict[str, Any]
) -> Counted:
    """Count examples with images, which the model's `processor` prepares, with `token_id` as the placeholder."""
    only_completion = {"completion_only_loss": "completion" in dataset.column_names} if task.name == "sft" else {}
    vision_collator: Any = task.vision_collator
    collator = vision_collator(processor, padding_free=True, **only_completion)
    groups: Any = task.make_collator(**options) if issubclass(task.collator, PromptGroups) else None
    as_prompts = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    lengths, prepared = [], []
    for example in dataset:
        if groups is None:
            batch = collator.rows([example])
        else:
            batch = processor.apply_chat_template([prompt_in_messages(example)["messages"]], **as_prompts)
            batch["labels"] = batch["input_ids"]
        masks = batch["attention_mask"].bool()
        lengths.append(masks.sum(1).tolist())
        rows, labels = (
            [row[mask][:max_length].numpy() for row, mask in zip(x, masks, strict=True)]
            for x in (batch["input_ids"], collator.row_labels(batch))
        )
        prepared.append((rows, labels, Hasher.hash(of_images(batch))))

    def count(index: np.ndarray) -> BatchCounts:
        rows, labels, keys = zip(*(prepared[i] for i in index), strict=True)
        sources = sources_of(keys)[0] * len(rows[0])
        images = RowImages(VisionRules(token_id), sources)
        if groups is not None:
            return groups.flatten([*chain(*rows)], images).counts
        by_copy = [[*chain(*zip(*of_examples, strict=True))] for of_examples in (rows, labels)]
        return FlatBatch.from_rows(*by_copy, images=images).counts

    return len(prepared), np.array(lengths), count  # TRL drops no examples with images
