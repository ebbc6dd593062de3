"""Collators: TRL's padded rows, plus the flat batch that the model computes instead."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from transformers.data.data_collator import DataCollatorMixin
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as DataCollatorForReward
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ...capabilities import classes_of
from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs, Make
from .lengths import Example
from .rows import AS_THEY_ARE, CollatedRows, ReadAs, documents_of


@dataclass
class FlatCollator(DataCollatorMixin):
    """
    Mixin, placed before one of TRL's collators: adds the flat batch, which the model computes instead of the rows.

    The flat batch is built last, from the rows that `torch_call` returns, including any edits of a subclass. The rows
    hold only integers, so padding costs nothing. TRL's `max_length` applies first; `pad_to_multiple_of` pads both.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch, as `"flat_batch"`. If `False`, the output is that of TRL's collator, tensor
            for tensor.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether to compute shared prefixes once. Read only if `padding_free`.
        keeps_rows (`bool`, *optional*, defaults to `False`):
            Whether batches also have their [`~trl_paddingfree.core.data.rows.CollatedRows`], as `"rows"`, from which a
            trainer can build smaller batches.
        rotary_limit (`int`, *optional*):
            The row length from which rotary frequencies of the model depend on the longest row. Flat batches of rows
            that are padded to this length or beyond have the frequencies of the padded rows.
        collate (`Callable`, *optional*):
            Another collator, from examples to rows, which takes the place of TRL's: see [`FlatCollator.of`].
        read_as ([`~trl_paddingfree.core.data.rows.ReadAs`], *optional*):
            How examples of the dataset become those that TRL's collator reads. By default, they are the same.

    >>> from dataclasses import dataclass
    >>> from trl.trainer.dpo_trainer import DataCollatorForPreference
    >>> from trl_paddingfree import FlatCollator
    >>> @dataclass
    ... class OwnCollator(FlatCollator, DataCollatorForPreference):
    ...     pass
    >>> collator = OwnCollator(pad_token_id=0, padding_free=True)
    >>> collator([{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}])["flat_batch"].input_ids
    tensor([[1, 2, 3, 2, 4, 5]])
    """

    padding_free: bool = False
    prefix_sharing: bool = True
    keeps_rows: bool = False
    rotary_limit: int | None = None
    collate: Callable[[list[Example]], Inputs] | None = None
    read_as: ReadAs = AS_THEY_ARE

    # Rows per example; the first rows of all examples come first, then the second ones. `None`: two of a pair, else
    # the number of rows divided by that of examples. A collator that leaves out examples must set it
    rows_per_example: ClassVar[int | None] = None
    # Whether `of` also takes subclasses of TRL's collator
    takes_subclasses: ClassVar[bool] = True
    # Arguments of TRL's collator that determine the padding of rows and of flat batches
    padded_by: ClassVar[tuple[str, ...]] = ("pad_to_multiple_of", "pad_token_id")

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        """`(R, L)` int64: the tokens of `rows` that are scored, else -100. By default, those in `completion_mask`."""
        return rows["input_ids"].masked_fill(rows["completion_mask"] == 0, IGNORE_INDEX)

    @classmethod
    def flattens(cls, other: object) -> bool:
        """Whether `of` takes `other`, a collator that knows of no flat batches: TRL's own, or a subclass of it."""
        bases = cls.trl_collators()
        return isinstance(other, bases) if cls.takes_subclasses else type(other) in bases

    @classmethod
    def trl_collators(cls) -> tuple[type, ...]:
        """TRL's collators that this class extends."""
        return tuple(x for x in cls.__bases__ if not issubclass(x, FlatCollator) and x is not DataCollatorMixin)

    @classmethod
    def of(cls, other: Any) -> Self:
        """A collator that makes the rows of `other` flat, with all that it holds, fields or not."""
        made = FlatCollator.changed(other)  # a copy of TRL's collator, which knows no `changed`
        made.__class__ = cls  # our own fields have the defaults of the class until `changed` sets them
        if type(other) not in cls.__bases__:
            made.collate = other  # a subclass may give other rows than TRL's
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, also of the collator whose rows this one makes flat, unless it is an option of ours."""
        super().__setattr__(name, value)
        if vars(self).get("collate") is None:
            return
        others = (base for base in type(self).__mro__ if not issubclass(base, FlatCollator))
        of_trl = {option for base in others for option in getattr(base, "__dataclass_fields__", ())}
        if name not in self.__dataclass_fields__.keys() - of_trl:
            setattr(self.collate, name, value)

    def changed(self, **values: Any) -> Self:
        """A copy with these `values`, which shares everything else that a subclass holds, fields or not."""
        vars(other := copy(self)).update(values)
        return other

    def flatten(self, rows: Inputs, make: Make = FlatBatch.from_padded) -> FlatBatch:
        """The flat batch of padded rows, as `make` makes it."""
        mask, lengths = rows["attention_mask"], rows["attention_mask"].sum(1, keepdim=True)
        if rows["input_ids"].is_floating_point():
            empty = "" if lengths.all() else " An empty row comes first: leave it out with `dataset.filter`."
            raise ValueError(f"`input_ids` are of type {rows['input_ids'].dtype}, and tokens are whole numbers.{empty}")
        if (mask != (torch.arange(mask.size(1)) < lengths)).any():
            raise ValueError(
                f"{type(self).__name__} gives an `attention_mask` with gaps, or padding on the left, which a flat "
                "batch cannot hold: pad rows on the right, or set `padding_free=False`."
            )
        options: dict[str, Any] = {name: getattr(self, name) for name in self.padded_by}
        options["prefix_sharing"] = self.prefix_sharing
        longest = max(mask.size(1), options.get("pad_to_multiple_of") or 0)  # also of what pads the flat row
        if self.rotary_limit is not None and longest >= self.rotary_limit:
            options["reach"] = mask.size(1)
        return make(rows["input_ids"], mask, self.row_labels(rows), **options)

    def __call__(self, features: list[Example], return_tensors: str | None = None) -> Inputs:
        given, features = features, self.read_as.examples(features)
        rows = super().__call__(features, return_tensors) if self.collate is None else self.collate(features)
        if not self.padding_free:
            return rows
        collated = self.read_as.rows(self.collated_rows(rows, features), given)
        inputs = collated.with_flat(self)
        return {**inputs, "rows": collated} if self.keeps_rows else inputs

    def collated_rows(self, rows: Inputs, features: list[Example]) -> CollatedRows:
        """The `rows` that TRL's collator made from `features`, with the number of examples that they hold."""
        num_rows, per_example, num_features = len(rows["input_ids"]), self.rows_per_example, len(features)
        if per_example is None and isinstance(self, (DataCollatorForPreference, DataCollatorForReward)):
            per_example = 2  # however many pairs a subclass has left out
        if per_example is None and (num_rows % num_features or not num_rows):
            raise ValueError(
                f"{type(self).__name__} gives {num_rows} rows for {num_features} examples, and does not say how many "
                "rows each example has. Set it on the class, such as `rows_per_example = 2` for pairs."
            )
        return CollatedRows(rows, num_rows // (per_example or num_rows // num_features))


@dataclass
class PreferenceCollator(FlatCollator, DataCollatorForPreference):
    """
    Collator for preference pairs: TRL's [`~trl.trainer.dpo_trainer.DataCollatorForPreference`], with its arguments and
    those of [`FlatCollator`].

    >>> from trl_paddingfree import PreferenceCollator
    >>> collator = PreferenceCollator(pad_token_id=0, padding_free=True)
    >>> first = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    >>> second = {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]}
    >>> batch = collator([first, second])
    >>> batch["input_ids"]
    tensor([[ 1,  2,  3,  4,  5],
            [ 7,  8,  9,  0,  0],
            [ 1,  2,  3,  6,  0],
            [ 7,  8, 10, 11,  0]])
    >>> batch["flat_batch"].input_ids
    tensor([[ 1,  2,  3,  4,  5,  7,  8,  9,  3,  6,  8, 10, 11]])
    """


@dataclass
class LanguageModelingCollator(FlatCollator, DataCollatorForLanguageModeling):
    """
    Collator for instruction data: TRL's [`~trl.trainer.sft_trainer.DataCollatorForLanguageModeling`], with its
    arguments and those of [`FlatCollator`]; `prefix_sharing` is off by default.

    With `padding_free`, it returns one padded row of integers per document, where TRL's returns a single unpadded row.
    Examples that TRL has packed (they have `"seq_lengths"`) are split back into documents, so that no document sees
    another with any attention implementation, and the first token of each is not scored, as in TRL. With
    `cuts_packed=False`, they stay whole, as in padded TRL, which ignores `"seq_lengths"`.

    >>> from trl_paddingfree import LanguageModelingCollator
    >>> collator = LanguageModelingCollator(pad_token_id=0, padding_free=True)
    >>> packed = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "seq_lengths": [3, 2]}
    >>> batch = collator([packed, {"input_ids": [6], "seq_lengths": [1]}])
    >>> batch["labels"]  # those of prompts, as here the second, stay out
    tensor([[-100, -100,    3],
            [-100,    5, -100],
            [-100, -100, -100]])
    >>> batch["flat_batch"].position_ids
    tensor([[0, 1, 2, 0, 1, 0]])
    """

    prefix_sharing: bool = False
    cuts_packed: bool = True

    rows_per_example: ClassVar[int | None] = 1  # each document of a packed example counts as one
    takes_subclasses: ClassVar[bool] = False  # whose rows may be documents without padding

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return rows["labels"]

    def torch_call(self, examples: list[Example]) -> Inputs:
        if not self.padding_free:
            return super().torch_call(examples)
        pad = self.changed(padding_free=False, return_position_ids=False)
        if self.cuts_packed:
            pad.pad_to_multiple_of = None  # TRL pads packed rows, not documents
        documents = [document for example in examples for document in documents_of(example, self.cuts_packed)]
        rows = super(LanguageModelingCollator, pad).torch_call(documents)  # TRL's, or that of a class before it
        if self.cuts_packed:
            rows["labels"][:, :1] = IGNORE_INDEX  # as in TRL: some losses count labels before they are shifted
        return rows

    def flatten(self, rows: Inputs, make: Make = FlatBatch.from_padded) -> FlatBatch:
        batch = super().flatten(rows, make)
        multiple = self.pad_to_multiple_of or 1
        packed = -(-batch.counts.real // multiple) * multiple
        return replace(batch, packed_length=packed) if self.cuts_packed else batch


@dataclass
class RewardCollator(FlatCollator, DataCollatorForReward):
    """
    Collator for reward-model pairs: TRL's [`~trl.trainer.reward_trainer.DataCollatorForPreference`], with its
    arguments and those of [`FlatCollator`]. `pad_token_id` must be the model's, which finds the end of a row by it.

    >>> from trl_paddingfree import RewardCollator
    >>> collator = RewardCollator(pad_token_id=0, padding_free=True)
    >>> batch = collator([{"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]}])
    >>> batch["input_ids"]
    tensor([[1, 2, 3, 4],
            [1, 2, 5, 0]])
    >>> batch["flat_batch"].input_ids
    tensor([[1, 2, 3, 4, 2, 5]])
    """

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return torch.full_like(rows["input_ids"], IGNORE_INDEX)  # the head scores rows, not tokens


@dataclass
class FlatMismatchedCollator(FlatCollator):
    """If a batch has KTO's mismatched rows (`"KL_input_ids"`), adds their flat batch as `mismatched`."""

    def flatten(self, rows: Inputs, make: Make = FlatBatch.from_padded) -> FlatBatch:
        batch = super().flatten(rows, make)
        if "KL_input_ids" not in rows:
            return batch
        mismatched = {name: rows[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")}
        return replace(batch, mismatched=super().flatten(mismatched, make))


@dataclass
class UnpairedPreferenceCollator(FlatMismatchedCollator, DataCollatorForUnpairedPreference):
    """
    Collator for unpaired preferences (completions labeled desirable or not): TRL's
    [`~trl.trainer.kto_trainer.DataCollatorForUnpairedPreference`], with its arguments and those of [`FlatCollator`].

    >>> from trl_paddingfree import UnpairedPreferenceCollator
    >>> collator = UnpairedPreferenceCollator(pad_token_id=0, padding_free=True)
    >>> examples = [
    ...     {"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [6, 7], "label": True},
    ...     {"prompt_ids": [1, 2], "completion_ids": [6, 7], "KL_completion_ids": [3], "label": False},
    ... ]
    >>> batch = collator(examples)
    >>> batch["flat_batch"].input_ids, batch["flat_batch"].mismatched.input_ids
    (tensor([[1, 2, 3, 2, 6, 7]]), tensor([[1, 2, 6, 7, 2, 3]]))
    """

    rows_per_example: ClassVar[int | None] = 1


def concatenated_inputs(
    examples: list[Example],
    *,
    padding_free: bool = True,
    prefix_sharing: bool = True,
    pad_token_id: int = 0,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    pad_to_multiple_of: int | None = None,
) -> Inputs:
    """
    Lay preference pairs out as tensors: all chosen sequences first, then all rejected ones.

    Shared prefixes are for attention of your own: models of transformers ignore `kv_index` and are silently wrong. Call
    them with `prefix_sharing=False`, or a model that has a [`FlatModel`] with the padded rows and a `flat_batch`.

    Args:
        examples (`list[dict[str, list[int]]]`):
            Pairs with `"prompt_ids"`, `"chosen_ids"` and `"rejected_ids"`, or prompts that a trainer has prepared with
            their answers, which are written out as pairs.
        padding_free (`bool`, *optional*, defaults to `True`):
            Whether to lay the sequences out on one flat row with their boundaries (an `attention_mask` of ones would
            let them see each other), or on padded rows with an `attention_mask`.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether the flat row holds shared prefixes once. Read only if `padding_free`.
        pad_token_id, max_length, truncation_mode, pad_to_multiple_of:
            As in TRL's [`~trl.trainer.dpo_trainer.DataCollatorForPreference`]. Padding applies to the rows or flat row.

    Returns:
        `dict[str, Any]`: Padded: `input_ids`, `attention_mask` and `completion_mask` as from TRL's collator, plus
        `position_ids` and `labels`, all of shape `(2B, L)`, int64.
        Flat: `input_ids`, `position_ids` and `shift_labels` of shape `(1, T)`, int64; the boundaries `cu_seq_lens_q`
        and `cu_seq_lens_k` of shape `(N+1,)`, int32, with `max_length_q` and `max_length_k` as ints; `kv_index` of
        shape `(S,)`, int64, the flat position of every key/value row, or `None` when nothing is shared; and
        `use_cache=False`: with a cache, models let sequences see each other.

    >>> from trl_paddingfree import concatenated_inputs
    >>> pair = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    >>> flat = concatenated_inputs([pair])
    >>> flat["input_ids"], flat["position_ids"]
    (tensor([[1, 2, 3, 4, 5, 3, 6]]), tensor([[0, 1, 2, 3, 4, 2, 3]]))
    >>> flat["shift_labels"]  # the 3 that ends the prompt is there twice: it predicts 4 in one row and 6 in the other
    tensor([[-100, -100,    4,    5, -100,    6, -100]])
    >>> flat["cu_seq_lens_q"].tolist(), flat["cu_seq_lens_k"].tolist(), flat["kv_index"].tolist()
    ([0, 5, 7], [0, 5, 9], [0, 1, 2, 3, 4, 0, 1, 5, 6])
    """
    collator = PreferenceCollator(
        pad_token_id, max_length, truncation_mode, pad_to_multiple_of, prefix_sharing=prefix_sharing
    )
    for read_as in classes_of("collate", "Examples"):
        examples = read_as().examples(examples)
    rows = collator(examples)
    if not padding_free:
        position_ids = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return {**rows, "position_ids": position_ids, "labels": collator.row_labels(rows)}
    batch = collator.flatten(rows)
    layout, shift_labels = batch.layout, torch.full_like(batch.input_ids, IGNORE_INDEX)
    shift_labels[0, batch.scored_index] = batch.shift_labels[0]
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "shift_labels": shift_labels,
        "cu_seq_lens_q": layout.cu_seqlens_q,
        "cu_seq_lens_k": layout.cu_seqlens_k,
        "max_length_q": layout.segments.max_seqlen_q,
        "max_length_k": layout.segments.max_seqlen_k,
        "kv_index": layout.kv_index,
        "use_cache": False,
    }
