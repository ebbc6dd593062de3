"""Collators of reward models and of unpaired preferences: TRL's rows, and beside them the flat batch."""

from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, ClassVar

import torch
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from .collate import FlatCollator
from .lengths import Example


@dataclass
class RewardCollator(FlatCollator, DataCollatorForPreference):
    """
    Collator of pairs for reward models: TRL's [`~trl.trainer.reward_trainer.DataCollatorForPreference`], with its
    arguments and those of [`FlatCollator`]. `pad_token_id` is that of the model, which finds the end of a row by it.

    >>> from trl_paddingfree import RewardCollator
    >>> collator = RewardCollator(pad_token_id=0, padding_free=True)
    >>> batch = collator([{"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]}])
    >>> batch["input_ids"]
    tensor([[1, 2, 3, 4],
            [1, 2, 5, 0]])
    >>> batch["flat_batch"].input_ids
    tensor([[1, 2, 3, 4, 2, 5]])
    """

    rows_per_example: ClassVar[int | None] = 2

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return torch.full_like(rows["input_ids"], IGNORE_INDEX)  # the head reads rows, and scores no token


@dataclass
class UnpairedPreferenceCollator(FlatCollator, DataCollatorForUnpairedPreference):
    """
    Collator of completions that are desirable or not: TRL's
    [`~trl.trainer.kto_trainer.DataCollatorForUnpairedPreference`], with its arguments and those of [`FlatCollator`].

    The flat batch of the mismatched rows (`"KL_input_ids"`), if there are any, is the `companion` of the batch's.

    >>> from trl_paddingfree import UnpairedPreferenceCollator
    >>> collator = UnpairedPreferenceCollator(pad_token_id=0, padding_free=True)
    >>> examples = [
    ...     {"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [6, 7], "label": True},
    ...     {"prompt_ids": [1, 2], "completion_ids": [6, 7], "KL_completion_ids": [3], "label": False},
    ... ]
    >>> batch = collator(examples)
    >>> batch["flat_batch"].input_ids, batch["flat_batch"].companion.input_ids
    (tensor([[1, 2, 3, 2, 6, 7]]), tensor([[1, 2, 6, 7, 2, 3]]))
    """

    rows_per_example: ClassVar[int | None] = 1

    def flatten(self, rows: Inputs, *args: Any, **kwargs: Any) -> FlatBatch:
        batch = super().flatten(rows, *args, **kwargs)
        if "KL_input_ids" not in rows:
            return batch
        mismatched = {name: rows[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")}
        return replace(batch, companion=super().flatten(mismatched))


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
