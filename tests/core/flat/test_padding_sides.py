"""Rows that are padded on their left, on their right, or on both sides."""

import numpy as np
import pytest
import torch

from tests.helpers.tiny import SEED, SHARING
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.flat.batch import IGNORE_INDEX
from trl_paddingfree.padded import row_starts


def padded(rng, num_rows, width, prompt):
    """Rows of any length at any place, some of which start alike."""
    ids, mask = torch.zeros(num_rows, width, dtype=torch.long), torch.zeros(num_rows, width, dtype=torch.long)
    for row in range(num_rows):
        start = int(rng.integers(0, width))
        length = int(rng.integers(0, width - start + 1))
        tokens = [*prompt, *rng.integers(1, 50, width).tolist()] if row % 2 else rng.integers(1, 50, width).tolist()
        ids[row, start : start + length] = torch.tensor(tokens[:length], dtype=torch.long)
        mask[row, start : start + length] = 1
    return ids, mask


@SHARING
def test_rows_come_back_to_the_columns_that_they_had(prefix_sharing):
    rng = np.random.default_rng(SEED)
    for _ in range(50):
        ids, mask = padded(rng, num_rows=5, width=11, prompt=[7, 8, 9])
        batch = FlatBatch.from_padded(
            ids, mask, ids.masked_fill(mask == 0, IGNORE_INDEX), prefix_sharing=prefix_sharing
        )
        assert batch.to_rows() == [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
        assert torch.equal(batch.row_mask, mask.bool())
        assert torch.equal(batch.input_ids[0][batch.row_index] * mask, ids)
        # Each token's own id stands in for what the model says of it: the first of a row has nothing before it
        scored = batch.scored_to_rows(batch.shift_labels.float())
        assert torch.equal(scored.long(), ids[:, 1:] * mask[:, 1:] * mask[:, :-1])


def test_padding_within_a_row_is_refused():
    assert row_starts(torch.tensor([[0, 0], [0, 1]])).tolist() == [0, 1]
    with pytest.raises(ValueError, match="Row 1 of `attention_mask` has padding between its tokens"):
        row_starts(torch.tensor([[0, 1, 1], [1, 0, 1]]))


def test_values_come_back_to_rows_on_the_device_that_they_lie_on():
    """The head of a model that is split across devices answers on another one than its embeddings are on."""
    batch = FlatBatch.from_rows([[1, 2, 3], [1, 4]], [[-100, 2, 3], [-100, 4]])
    scored = batch.scored_to_rows(torch.zeros(1, len(batch.scored_index), device="meta"))
    tokens = batch.tokens_to_rows(torch.zeros(1, batch.counts.computed, 5, device="meta"))
    assert (scored.shape, scored.device.type) == ((2, 2), "meta")
    assert (tokens.shape, tokens.device.type) == ((2, 3, 5), "meta")
