"""Collators of reward models and of unpaired preferences: TRL's rows, and beside them the flat batch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference

from ..flat.batch import IGNORE_INDEX, FlatBatch
from .collate import FlatCollator


@dataclass
class RewardCollator(FlatCollator, DataCollatorForPreference):
    """
    Collator of pairs for reward models. Without `padding_free`, its output is that of TRL's
    [`~trl.trainer.reward_trainer.DataCollatorForPreference`], tensor for tensor.

    With `padding_free`, the same rows come with a `"flat_batch"`, the [`FlatBatch`] that the model computes in their
    place.

    Args:
        pad_token_id (`int`):
            Token ID to use for padding: that of the model, which finds the end of a row by it.
        pad_to_multiple_of (`int`, *optional*):
            If set, the rows, and the flat batch, are padded to a multiple of this value.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            Only `"pt"` is supported.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that rows share are computed once. Read only if `padding_free`.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch also has a list of `"parts"`. Read only if `padding_free`.

    Examples:
    ```python
    >>> from trl_paddingfree import RewardCollator
    >>> collator = RewardCollator(pad_token_id=0, padding_free=True)
    >>> batch = collator([{"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]}])
    >>> batch["input_ids"]
    tensor([[1, 2, 3, 4],
            [1, 2, 5, 0]])
    >>> batch["flat_batch"].input_ids
    tensor([[1, 2, 3, 4, 2, 5]])

    ```
    """

    def row_labels(self, rows: dict[str, Any]) -> torch.Tensor:
        return torch.full_like(rows["input_ids"], IGNORE_INDEX)  # the head reads rows, and scores no token


@dataclass
class UnpairedPreferenceCollator(FlatCollator, DataCollatorForUnpairedPreference):
    """
    Collator of completions that are desirable or not. Without `padding_free`, its output is that of TRL's
    [`~trl.trainer.kto_trainer.DataCollatorForUnpairedPreference`], tensor for tensor.

    With `padding_free`, the same rows come with a `"flat_batch"`, the [`FlatBatch`] that the model computes in their
    place. Its `companion` is the flat batch of the mismatched rows (`"KL_input_ids"`), if there are any.

    Args:
        pad_token_id (`int`):
            Token ID to use for padding.
        max_length (`int`, *optional*):
            Maximum length of each sequence, applied before anything is flattened or shared.
        pad_to_multiple_of (`int`, *optional*):
            If set, the rows, and the flat batches, are padded to a multiple of this value.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            Only `"pt"` is supported.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that rows share are computed once. Read only if `padding_free`.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch also has a list of `"parts"`. Read only if `padding_free`.

    Examples:
    ```python
    >>> from trl_paddingfree import UnpairedPreferenceCollator
    >>> collator = UnpairedPreferenceCollator(pad_token_id=0, padding_free=True)
    >>> examples = [
    ...     {"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [6, 7], "label": True},
    ...     {"prompt_ids": [1, 2], "completion_ids": [6, 7], "KL_completion_ids": [3], "label": False},
    ... ]
    >>> batch = collator(examples)
    >>> batch["flat_batch"].input_ids, batch["flat_batch"].companion.input_ids
    (tensor([[1, 2, 3, 2, 6, 7]]), tensor([[1, 2, 6, 7, 2, 3]]))

    ```
    """

    def flatten(self, rows: dict[str, Any]) -> FlatBatch:
        batch = super().flatten(rows)
        return replace(batch, companion=super().flatten(mismatched(rows))) if "KL_input_ids" in rows else batch

    def is_edited(self, batch: dict[str, Any]) -> bool:
        if super().is_edited(batch) or ("KL_input_ids" in batch) != (batch["flat_batch"].companion is not None):
            return True
        beside = {**mismatched(batch), "flat_batch": batch["flat_batch"].companion} if "KL_input_ids" in batch else {}
        return bool(beside) and super().is_edited(beside)


def mismatched(rows: dict[str, Any]) -> dict[str, Any]:
    """The mismatched rows of a batch, under the names of its own."""
    return {name: rows[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")}


@dataclass
class PromptGroups:
    """
    Gives the flat batch of prompts with several completions each, for predictions.

    What will be generated is not known: every completion has the same length, and none starts like another.

    Args:
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prompts are computed once.
        num_generations (`int`, *optional*, defaults to `8`):
            Completions of each prompt.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens of each completion.
    """

    prefix_sharing: bool = True
    num_generations: int = 8
    max_completion_length: int = 256

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        rows, generated = [], 0
        for example in examples:
            for _ in range(self.num_generations):
                tokens = range(generated + 1, generated + self.max_completion_length + 1)
                rows.append([*example["prompt_ids"], *(-token for token in tokens)])
                generated += self.max_completion_length
        nothing = [[IGNORE_INDEX] * len(row) for row in rows]
        return {"flat_batch": FlatBatch.from_rows(rows, nothing, prefix_sharing=self.prefix_sharing)}
