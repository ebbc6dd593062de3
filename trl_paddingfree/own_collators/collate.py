"""A collator that makes the padded rows of another one flat."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from ..core.data.collate import FlatCollator
from ..core.data.lengths import Example
from ..core.data.rows import CollatedRows
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs, Make
from ..padded import default_positions, flattened_at, jumps, row_starts, scores_padding

# Where the documents of rows without padding begin, for kernels: the same as their `position_ids` say
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    """`(R, L)` bool: where documents begin in rows without padding, as transformers finds it out from positions."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff() != 1
    return begins


def _starts(begins: torch.Tensor) -> list[int]:
    """The first tokens of documents, among the tokens of all rows."""
    return begins.flatten().nonzero().flatten().tolist()


@dataclass
class PaddedRowsCollator(FlatCollator):
    """
    Makes the rows of another collator flat, such as one of transformers' or a function of one's own.

    It keeps what the other one returns, `input_ids` and `labels` of shape `(R, L)`, int64, with either an
    `attention_mask`, or `position_ids` without one: those are rows without padding, in which documents begin wherever
    positions do not count on, and no document sees another, as in [`~transformers.DataCollatorWithFlattening`].

    Args:
        counts_by_mask (`bool`, *optional*, defaults to `False`):
            Whether the model counts positions from the first token of a row, not by column.
        carries_state (`bool`, *optional*, defaults to `False`):
            Whether layers of the model hand a state on from token to token, and so from padding on the left to a row.

    >>> from transformers import default_data_collator
    >>> from trl_paddingfree.own_collators.collate import PaddedRowsCollator
    >>> collator = PaddedRowsCollator(collate=default_data_collator, padding_free=True)
    >>> first = {"input_ids": [0, 0, 1, 2], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, -100, 2]}
    >>> second = {"input_ids": [3, 4, 5, 0], "attention_mask": [1, 1, 1, 0], "labels": [-100, 4, 5, -100]}
    >>> batch = collator([first, second])
    >>> batch["flat_batch"].input_ids, batch["flat_batch"].position_ids
    (tensor([[1, 2, 3, 4, 5]]), tensor([[2, 3, 0, 1, 2]]))
    """

    counts_by_mask: bool = False
    carries_state: bool = False

    rows_per_example: ClassVar[int | None] = 1
    padded_by: ClassVar[tuple[str, ...]] = ()

    @property
    def _name(self) -> str:
        return f"`data_collator` ({getattr(self.collate, '__name__', type(self.collate).__name__)})"

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return rows["labels"]

    def collated_rows(self, rows: Inputs, features: list[Example]) -> CollatedRows:
        rows = dict(rows)  # a tokenizer's `BatchEncoding` is none
        self._refuse_others(rows)
        ids, positions = rows["input_ids"], rows.get("position_ids")
        if positions is not None:
            rows["position_ids"] = positions.expand_as(ids)
        if rows.get("attention_mask") is not None:
            return CollatedRows(rows, len(ids))
        given = {name: rows.pop(name) for name in _BOUNDARIES if name in rows}
        begins = _begins(rows["position_ids"])
        ends, order = given.get("cu_seq_lens_q"), given.get("seq_idx")
        for name, is_other in {
            "cu_seq_lens_q": ends is not None and ends.tolist() != [*_starts(begins), ids.numel()],
            "seq_idx": order is not None and not torch.equal(order.diff() != 0, begins[:, 1:]),
        }.items():
            if is_other:
                raise ValueError(
                    f"{self._name} gives `{name}` of documents that differ from those of its `position_ids`, which "
                    "restart at each: make them agree, or give `position_ids` alone."
                )
        # TRL counts such rows as one, so that they are never divided
        return CollatedRows(rows, 1)

    def _refuse_others(self, rows: Inputs) -> None:
        """Refuse what is no batch of padded rows, or of rows of documents."""
        advice = "or set `padding_free=False`"
        if rows.get("inputs_embeds") is not None:
            raise ValueError(
                f"{self._name} gives `inputs_embeds`, and a flat batch is made of tokens: give `input_ids`, {advice}."
            )
        if rows.get("pixel_values") is not None:
            raise ValueError(
                f"{self._name} gives `pixel_values`, and a flat batch has to know whose images they are: have the "
                "dataset's column `image` or `images` hold them, and leave the collator out or derive it from "
                f"`trl_paddingfree.images.collate.VisionLanguageModelingCollator`, {advice}."
            )
        for name in ("input_ids", "labels"):
            if rows.get(name) is None:
                raise ValueError(
                    f"{self._name} gives no `{name}`, only {list(rows)}: give a tensor of shape `(rows, tokens)`, "
                    f"in which labels are -100 where nothing is learned, {advice}."
                )
        if rows.get("attention_mask") is None and rows.get("position_ids") is None:
            raise ValueError(
                f"{self._name} gives neither an `attention_mask` nor `position_ids`, only {list(rows)}: without one "
                "of them, the trainer cannot tell what is padding, and TRL counts no tokens. If the dataset has "
                "the column, set `remove_unused_columns=False`."
            )
        shape: Any = getattr(rows["input_ids"], "shape", None)
        for name in ("input_ids", "labels", "attention_mask", "position_ids"):
            value = rows.get(name)
            if value is None:
                continue
            if not torch.is_tensor(value):
                raise ValueError(
                    f"{self._name} gives `{name}` of type {type(value).__name__}, not a tensor: set its "
                    f"`return_tensors='pt'` and its `padding=True`, {advice}."
                )
            shapes = [shape, (1, *shape[1:])] if name == "position_ids" else [shape]
            if value.ndim != 2 or value.shape not in shapes:
                raise ValueError(
                    f"{self._name} gives `{name}` of shape {tuple(value.shape)} for `input_ids` of shape "
                    f"{tuple(shape)}, and a flat batch is made of rows with one number per token: give both in shape "
                    f"`(rows, tokens)`, {advice}."
                )
            if name != "attention_mask" and (value.is_floating_point() or value.dtype == torch.bool):
                raise ValueError(f"{self._name} gives `{name}` of type {value.dtype}, and these are whole numbers.")
        if rows.get("attention_mask") is not None and (found := rows.keys() & {*_BOUNDARIES}):
            raise ValueError(
                f"{self._name} gives an `attention_mask` and `{min(found)}`: with a mask, models do not keep "
                "documents of one row apart. Give `position_ids` instead of the mask, or leave them out."
            )

    def flatten(self, rows: Inputs, make: Make = FlatBatch.from_padded) -> FlatBatch:
        ids, labels, mask, positions = (
            None if (x := rows.get(name)) is None else x.cpu()
            for name in ("input_ids", "labels", "attention_mask", "position_ids")
        )
        assert ids is not None
        assert labels is not None
        if mask is None:
            assert positions is not None
            return self._of_documents(ids.long(), labels.long(), positions.long())
        real = mask != 0
        is_left = row_starts(real) > 0
        if is_left.any() and self.carries_state:
            raise ValueError(
                f"{self._name} pads row {int(is_left.int().argmax())} on the left, and the model carries state from "
                "token to token, also out of padding: set `tokenizer.padding_side = 'right'`, or "
                "`padding_free=False`."
            )
        if (found := scores_padding(labels, real)).any():
            row = int(found.int().argmax())
            raise ValueError(
                f"{self._name} gives `labels` that score padding in row {row}, or its first token, which padding on "
                f"its left would predict: set labels to {IGNORE_INDEX} where `attention_mask` is 0 and, with padding "
                "on the left, at the first token; or set `tokenizer.padding_side = 'right'`, or `padding_free=False`."
            )
        counted = default_positions(real.long(), self.counts_by_mask) if positions is None else positions.long()
        if (found := jumps(counted, real)).any():
            raise ValueError(
                f"{self._name} gives `position_ids` that do not count row {int(found.int().argmax())} up one by one, "
                "and an `attention_mask`, with which models do not keep documents of one row apart: leave the mask out "
                "of rows of several documents without padding, else leave `position_ids` out."
            )
        return self._flat(ids.long(), real, labels.long(), counted)

    def _flat(self, ids: torch.Tensor, real: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> FlatBatch:
        reach = int(positions.max()) + 1 if positions.numel() else 0
        options = {"reach": reach} if self.rotary_limit is not None and reach >= self.rotary_limit else {}
        return flattened_at(positions, ids, real, labels, prefix_sharing=self.prefix_sharing, **options)

    def _of_documents(self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> FlatBatch:
        """The flat batch of rows of documents, whose `row_index` is of the rows."""
        begins = _begins(positions)
        if (scored := begins[:, 1:] & (labels[:, 1:] != IGNORE_INDEX)).any():
            row, column = (int(x) for x in scored.nonzero()[0])
            raise ValueError(
                f"{self._name} gives a label to token {column + 1} of row {row}, the first of a document, which the "
                f"document before it would predict: set it to {IGNORE_INDEX}."
            )
        lengths = [stop - start for start, stop in pairwise([*_starts(begins), ids.numel()])]
        parts = [x.flatten().split(lengths) for x in (ids, torch.ones_like(ids), labels, positions)]
        ids_of, real, labels_of, positions_of = (pad_sequence(x, batch_first=True) for x in parts)
        labels_of = labels_of.masked_fill(real == 0, IGNORE_INDEX)
        batch = self._flat(ids_of, real != 0, labels_of, positions_of)
        return replace(
            batch,
            row_index=batch.row_index[batch.row_mask].view_as(ids),
            row_mask=torch.ones_like(ids, dtype=torch.bool),
            counts=replace(batch.counts, padded=ids.numel()),
        )
