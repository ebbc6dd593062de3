"""Images on a flat row: which feature each placeholder gets, which rows share, and image blocks."""

import os
import pickle

import numpy as np
import pytest
import torch

from trl_paddingfree.flat.batch import IGNORE_INDEX, FlatBatch
from trl_paddingfree.flat.images import RowImages
from trl_paddingfree.model.masks import dense_mask, segment_mask

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
IMAGE = 99


def flat(rows, groups, copies=1, sharing=True, blocks=None):
    """A flat batch of rows that score all tokens but their first."""
    labels = [[IGNORE_INDEX, *row[1:]] for row in rows]
    images = RowImages(IMAGE, groups, copies, blocks=blocks)
    return FlatBatch.from_rows(rows, labels, prefix_sharing=sharing, images=images)


def random_rows(seed):
    """Pairs of rows with up to two images of up to three tokens, some rows with equal images; and their groups."""
    rng = np.random.default_rng(seed)
    prompts, groups = [], []
    for group in range(4):
        runs = [[IMAGE] * int(rng.integers(1, 4)) for _ in range(int(rng.integers(0, 3)))]
        prompts.append([1, *(t for run in runs for t in (*run, int(rng.integers(2, 4))))])
        groups.append(group if runs else 100)
    prompts.append(prompts[0])
    groups.append(groups[0])
    rows = [prompt + rng.integers(4, 6, rng.integers(1, 4)).tolist() for _ in range(2) for prompt in prompts]
    return rows, groups * 2


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("draw", range(8))
def test_every_row_gets_its_own_features_in_order(draw, sharing):
    rows, groups = random_rows(SEED + draw)
    batch = flat(rows, groups, copies=2, sharing=sharing)
    assert batch.to_rows() == rows
    # What the model does: write the next feature at each placeholder of the flat row
    index = batch.images.feature_index
    index = torch.arange(batch.images.num_features) if index is None else index
    written = torch.full((batch.input_ids.size(1),), -1)
    written[batch.input_ids[0] == IMAGE] = index
    half = rows[: len(rows) // 2]
    firsts = np.cumsum([0, *(row.count(IMAGE) for row in half)])
    first_of = {}
    for r, group in enumerate(groups[: len(half)]):
        first_of.setdefault(group, firsts[r])
    for r, row in enumerate(rows):
        got = [int(x) for x in written[batch.row_index[r, : len(row)]] if x >= 0]
        own = [int(firsts[r % len(half)]) + k for k in range(row.count(IMAGE))]
        equal = [int(first_of[groups[r]]) + k for k in range(row.count(IMAGE))]
        assert all(x in (a, b) for x, a, b in zip(got, own, equal, strict=True))
        assert len(got) == row.count(IMAGE)


def test_rows_share_equal_images_and_no_others():
    rows = [[1, IMAGE, IMAGE, 2, 5], [1, IMAGE, IMAGE, 2, 6]]
    assert flat(rows, [0, 0]).counts.computed == 7  # the last common token is there twice
    assert flat(rows, [0, 1]).counts.computed == 10
    assert flat(rows, [0, 1]).counts.distinct == 9
    # Without sharing, and with images in row order, features need no index
    assert flat(rows, [0, 1], sharing=False).images.feature_index is None


def test_copies_that_were_cut_apart_are_refused_in_words_that_trl_knows():
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        flat([[1, IMAGE, IMAGE, 2], [1, IMAGE]], [0, 0], copies=2)


def test_images_travel_with_the_batch():
    batch = flat([[1, IMAGE, 2], [1, IMAGE, 3], [4, IMAGE, 3]], [0, 1, 0])
    moved = pickle.loads(pickle.dumps(batch)).to("cpu")
    assert moved.images.num_features == 3
    text = FlatBatch.from_rows([[1, 2]], [[1, 2]])
    assert text.images is None
    assert text.to("cpu").images is None


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("draw", range(4))
def test_tokens_of_a_block_see_each_other_in_every_row(draw, window):
    rows, groups = random_rows(SEED + draw)
    width = max(map(len, rows))
    blocks = np.array([[t == IMAGE for t in row] + [False] * (width - len(row)) for row in rows])
    batch = flat(rows, groups, copies=2, blocks=blocks)
    whole = dense_mask(batch.layout, window, torch.float32)[0, 0] == 0
    for row, inside, path in zip(rows, blocks, batch.row_index, strict=True):
        path, length = path[: len(row)], len(row)
        runs = np.cumsum(np.diff(inside[:length], prepend=False))
        for q in range(length):
            for k in range(length):
                same = inside[q] and inside[k] and runs[q] == runs[k]
                expected = (k <= q or same) and (window is None or k > q - window)
                assert bool(whole[path[q], path[k]]) == expected


def test_segments_of_equal_shape_have_masks_of_their_own_where_blocks_differ():
    rows = [[1, IMAGE, IMAGE, 2], [1, 3, IMAGE, IMAGE]]
    batch = flat(rows, [0, 1], sharing=False, blocks=np.array(rows) == IMAGE)
    first, second = (segment_mask(batch.layout, [i]) for i in range(2))
    assert first[0, 0, 1, 2]
    assert not second[0, 0, 1, 2]
    assert segment_mask(batch.layout.without_blocks(), [0]) is None
