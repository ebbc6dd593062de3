"""Padded rows: where they lie, and whether they are still those that a flat batch was made of. The rows are the truth.

Shape legend: see [`~trl_paddingfree.flat.segments`].
"""

import torch

from .batch import IGNORE_INDEX, FlatBatch

# What may have been edited, in the order of the answers
ROWS = ("input_ids", "attention_mask", "labels")


@torch.compiler.disable
def edits(
    batch: FlatBatch,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    exact_labels: bool = False,
) -> torch.Tensor:
    """
    `(3,)` bool: for each of [`ROWS`], `(R, L)` each, whether it differs from what `batch` was made of. Nothing waits.

    What stands in the padding does not matter. A mask of zeros only is no edit: it stands for a batch that counts for
    nothing. Fewer labels are none, as they are masked in the batch's answers, unless `exact_labels`.
    """
    index, mask = batch.row_index, batch.row_mask
    reshaped = [rows is not None and rows.shape != index.shape for rows in (input_ids, attention_mask, labels)]
    if any(reshaped):
        return torch.tensor(reshaped)
    found = [torch.zeros((), dtype=torch.bool, device=index.device)] * 3
    if input_ids is not None:
        found[0] = ((input_ids != batch.input_ids[0][index]) & mask).any()
    if attention_mask is not None:
        found[1] = (attention_mask.bool() != mask).any() & attention_mask.any()
    if labels is not None:
        targets = batch.input_ids.new_full((batch.input_ids.size(1),), IGNORE_INDEX)
        targets = targets.index_put((batch.scored_index,), batch.shift_labels[0])
        expected = targets[index[:, :-1]].masked_fill(~mask[:, 1:], IGNORE_INDEX)
        differs = labels[:, 1:] != expected
        found[2] = (differs if exact_labels else differs & (labels[:, 1:] != IGNORE_INDEX)).any()
    return torch.stack(found)


def row_spans(attention_mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Where each row of an `(R, L)` mask on the CPU begins, and its length; padding between its tokens is refused."""
    mask = attention_mask != 0
    lengths, starts = mask.sum(1), mask.int().argmax(1)
    places = torch.arange(mask.size(1))
    whole = (places >= starts[:, None]) & (places < (starts + lengths)[:, None])
    if not torch.equal(mask, whole):
        row = int((mask != whole).any(1).nonzero()[0])
        raise ValueError(
            f"Row {row} of `attention_mask` has padding between its tokens, and a flat batch has no place for it: pad "
            "rows on their left and on their right only, or set `padding_free=False`."
        )
    return starts.tolist(), lengths.tolist()
