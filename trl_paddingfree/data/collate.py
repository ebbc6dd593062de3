"""Collators: TRL's padded rows, and beside them the flat batch that the model computes instead."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.data.data_collator import DataCollatorMixin
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ..flat.batch import IGNORE_INDEX, FlatBatch
from ..flat.edits import edits
from .parts import collate_parts


@dataclass
class FlatCollator(DataCollatorMixin):
    """
    Mixed in before one of TRL's collators: adds the flat batch that the model computes in place of its rows.

    The flat batch is of the rows that leave the collator, whatever a subclass did to these.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that rows share are computed once. Read only if `padding_free`.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch also has a list of `"parts"`, batches of some of its examples
            each. Read only if `padding_free`.

    Examples:
    ```python
    >>> from dataclasses import dataclass
    >>> from trl.trainer.dpo_trainer import DataCollatorForPreference
    >>> from trl_paddingfree import FlatCollator
    >>> @dataclass
    ... class OwnCollator(FlatCollator, DataCollatorForPreference):
    ...     pass
    >>> collator = OwnCollator(pad_token_id=0, padding_free=True)
    >>> collator([{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}])["flat_batch"].input_ids
    tensor([[1, 2, 3, 2, 4, 5]])

    ```
    """

    padding_free: bool = False
    prefix_sharing: bool = True
    max_tokens: int | None = None

    def row_labels(self, rows: dict[str, Any]) -> torch.Tensor:
        """`(R, L)` int64: the tokens of `rows` that are scored, else -100. By default those of `completion_mask`."""
        return rows["input_ids"].masked_fill(rows["completion_mask"] == 0, IGNORE_INDEX)

    def flatten(self, rows: dict[str, Any]) -> FlatBatch:
        """The flat batch of padded rows."""
        if rows["input_ids"].is_floating_point():
            raise ValueError(f"`input_ids` are of type {rows['input_ids'].dtype}, and tokens are whole numbers.")
        own: Any = self  # the collator that this is mixed into
        return FlatBatch.from_padded(
            rows["input_ids"],
            self.row_labels(rows),
            rows["attention_mask"].sum(1).tolist(),
            prefix_sharing=self.prefix_sharing,
            pad_to_multiple_of=own.pad_to_multiple_of,
            pad_token_id=own.pad_token_id,
        )

    def is_edited(self, batch: dict[str, Any]) -> bool:
        """Whether the rows of a batch are not those that its flat batch was made of."""
        rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if edits(batch["flat_batch"], **rows, labels=self.row_labels(batch)).any():
            return True
        # Fewer scored tokens are no edit of a batch that is computed whole, but its parts have rows of their own
        return "parts" in batch and self._num_scored(batch) != sum(map(self._num_scored, batch["parts"]))

    def _num_scored(self, rows: dict[str, Any]) -> int:
        return int((self.row_labels(rows)[:, 1:] != IGNORE_INDEX).sum())

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.padding_free:
            trl: Any = super()
            return trl.torch_call(examples)
        return collate_parts(self.flat_call, examples, self.max_tokens)

    def flat_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The rows of some examples, with their flat batch."""
        trl: Any = super()
        rows = trl.torch_call(examples)
        return {**rows, "flat_batch": self.flatten(rows)}

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        batch = super().__call__(features, return_tensors)
        if not self.padding_free or ("flat_batch" in batch and not self.is_edited(batch)):
            return batch
        mask = batch["attention_mask"]
        if (mask != (torch.arange(mask.size(1)) < mask.sum(1, keepdim=True))).any():
            raise ValueError(
                f"{type(self).__name__} gives an `attention_mask` with gaps, or padding on the left, which a flat "
                "batch cannot hold: pad rows on the right, or set `padding_free=False`."
            )
        if "parts" in batch:
            raise ValueError(
                f"{type(self).__name__} edits rows that `max_tokens_per_micro_batch` has cut into parts: edit the "
                "examples before `super().torch_call(examples)`, or leave `max_tokens_per_micro_batch` out."
            )
        return {**batch, "flat_batch": self.flatten(batch)}


@dataclass
class PreferenceCollator(FlatCollator, DataCollatorForPreference):
    """
    Collator of preference pairs. Without `padding_free`, its output is that of TRL's
    [`~trl.trainer.dpo_trainer.DataCollatorForPreference`], tensor for tensor.

    With `padding_free`, the same rows come with a `"flat_batch"`, the [`FlatBatch`] that the model computes in their
    place. The rows hold integers only: their padding costs nothing.

    Args:
        pad_token_id (`int`):
            Token ID to use for padding.
        max_length (`int`, *optional*):
            Maximum length of each sequence, applied before anything is flattened or shared.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            `"keep_start"` or `"keep_end"`.
        pad_to_multiple_of (`int`, *optional*):
            If set, the rows, and the flat batch, are padded to a multiple of this value.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            Only `"pt"` is supported.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that rows share are computed once. Read only if `padding_free`.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch also has a list of `"parts"`, batches of some of its examples
            each. Read only if `padding_free`.

    Examples:
    ```python
    >>> from trl_paddingfree import PreferenceCollator
    >>> collator = PreferenceCollator(pad_token_id=0, padding_free=True)
    >>> batch = collator(
    ...     [
    ...         {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    ...         {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
    ...     ]
    ... )
    >>> batch["input_ids"]
    tensor([[ 1,  2,  3,  4,  5],
            [ 7,  8,  9,  0,  0],
            [ 1,  2,  3,  6,  0],
            [ 7,  8, 10, 11,  0]])
    >>> batch["flat_batch"].input_ids
    tensor([[ 1,  2,  3,  4,  5,  7,  8,  9,  3,  6,  8, 10, 11]])

    ```
    """


@dataclass
class LanguageModelingCollator(FlatCollator, DataCollatorForLanguageModeling):
    """
    Collator of instruction data. Without `padding_free`, its output is that of TRL's
    [`~trl.trainer.sft_trainer.DataCollatorForLanguageModeling`], tensor for tensor.

    With `padding_free`, it gives one padded row of integers per document and a `"flat_batch"`, the [`FlatBatch`] that
    the model computes in their place. Examples that TRL has packed (they have `"seq_lengths"`) are cut back into their
    documents, so no document sees another on any attention implementation.

    Args:
        pad_token_id (`int`):
            Token ID to use for padding.
        pad_to_multiple_of (`int`, *optional*):
            If set, the rows, and the flat batch, are padded to a multiple of this value.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to give rows and a flat batch. TRL's collator gives one row without padding instead.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether prefixes that rows share are computed once. Read only if `padding_free`.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch also has a list of `"parts"`, batches of some of its examples
            each. Read only if `padding_free`.

    Examples:
    ```python
    >>> from trl_paddingfree import LanguageModelingCollator
    >>> collator = LanguageModelingCollator(pad_token_id=0, padding_free=True)
    >>> packed = [{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}, {"input_ids": [6], "seq_lengths": [1]}]
    >>> batch = collator(packed)
    >>> batch["labels"]
    tensor([[   1,    2,    3],
            [   4,    5, -100],
            [   6, -100, -100]])
    >>> batch["flat_batch"].position_ids
    tensor([[0, 1, 2, 0, 1, 0]])

    ```
    """

    prefix_sharing: bool = False

    def row_labels(self, rows: dict[str, Any]) -> torch.Tensor:
        return rows["labels"]

    def flat_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The rows of some examples, with their flat batch."""
        documents = [document for example in examples for document in _documents(example)]
        pad = DataCollatorForLanguageModeling(self.pad_token_id, pad_to_multiple_of=self.pad_to_multiple_of)
        rows = pad(documents)
        return {**rows, "flat_batch": self.flatten(rows)}


def _documents(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of one example, each with its `input_ids` and `labels`."""
    ids, labels = example["input_ids"], example.get("labels", example["input_ids"])
    lengths = example.get("seq_lengths", [len(ids)])
    if len(labels) != len(ids) or sum(lengths) != len(ids):
        raise ValueError(
            f"An example has {len(ids)} `input_ids`, {len(labels)} `labels` and `seq_lengths` that sum to "
            f"{sum(lengths)}: all three must be the same."
        )
    documents, first = [], 0
    for length in lengths:
        documents.append({"input_ids": ids[first : first + length], "labels": labels[first : first + length]})
        first += length
    return documents


def concatenated_inputs(
    examples: list[dict[str, list[int]]],
    *,
    padding_free: bool = True,
    prefix_sharing: bool = True,
    pad_token_id: int = 0,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> dict[str, Any]:
    """
    Turn preference pairs into the inputs of a model: all chosen sequences first, then all rejected ones.

    Args:
        examples (`list[dict[str, list[int]]]`):
            Pairs with `"prompt_ids"`, `"chosen_ids"` and `"rejected_ids"`.
        padding_free (`bool`, *optional*, defaults to `True`):
            Whether to lay the sequences out on one flat row with their boundaries, or on padded rows with an
            `attention_mask`. A flat row has no `attention_mask`: an all-ones one would let its sequences see each
            other.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that sequences share are there once. Read only if `padding_free`.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token ID to use for padding.
        max_length (`int`, *optional*):
            Maximum length of each sequence, applied first.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            `"keep_start"` or `"keep_end"`.

    Returns:
        `dict[str, Any]`: Padded: `input_ids`, `position_ids`, `attention_mask` and `labels` of shape `(2B, L)`, int64.
        Flat: `input_ids`, `position_ids` and `shift_labels` of shape `(1, T)`, int64; the boundaries `cu_seq_lens_q`
        and `cu_seq_lens_k` of shape `(N+1,)`, int32, with `max_length_q` and `max_length_k` as ints; `kv_index` of
        shape `(S,)`, int64, the flat position of every key/value row, or `None` when nothing is shared.

    Examples:
    ```python
    >>> from trl_paddingfree import concatenated_inputs
    >>> pair = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    >>> flat = concatenated_inputs([pair])
    >>> flat["input_ids"], flat["position_ids"]
    (tensor([[1, 2, 3, 4, 5, 3, 6]]), tensor([[0, 1, 2, 3, 4, 2, 3]]))
    >>> flat["shift_labels"]  # the 3 that ends the prompt is there twice: it predicts 4 in one row and 6 in the other
    tensor([[-100, -100,    4,    5, -100,    6, -100]])
    >>> flat["cu_seq_lens_q"].tolist(), flat["cu_seq_lens_k"].tolist(), flat["kv_index"].tolist()
    ([0, 5, 7], [0, 5, 9], [0, 1, 2, 3, 4, 0, 1, 5, 6])
    >>> concatenated_inputs([pair], prefix_sharing=False)["input_ids"]
    tensor([[1, 2, 3, 4, 5, 1, 2, 3, 6]])

    ```
    """
    collator = PreferenceCollator(
        pad_token_id, max_length, truncation_mode, padding_free=padding_free, prefix_sharing=prefix_sharing
    )
    rows = collator(examples)
    if not padding_free:
        attention_mask = rows["attention_mask"]
        return {
            "input_ids": rows["input_ids"],
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "attention_mask": attention_mask,
            "labels": rows["input_ids"].masked_fill(rows["completion_mask"] == 0, IGNORE_INDEX),
        }
    batch = rows["flat_batch"]
    shift_labels = torch.full_like(batch.input_ids, IGNORE_INDEX)
    shift_labels[0, batch.scored_index] = batch.shift_labels[0]
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "shift_labels": shift_labels,
        "cu_seq_lens_q": batch.layout.cu_seqlens_q,
        "cu_seq_lens_k": batch.layout.cu_seqlens_k,
        "max_length_q": batch.layout.segments.max_seqlen_q,
        "max_length_k": batch.layout.segments.max_seqlen_k,
        "kv_index": batch.layout.kv_index,
    }
