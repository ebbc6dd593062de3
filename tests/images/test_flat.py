"""Images on a flat row: which feature each placeholder gets, which rows share, and image blocks."""

import pickle

import numpy as np
import pytest
import torch

from tests.helpers.tiny import SEED, SHARING
from trl_paddingfree.core.flat.batch import IGNORE_INDEX
from trl_paddingfree.core.model.attention import dense_mask, masks_of_calls
from trl_paddingfree.images.cuts import equal_images
from trl_paddingfree.images.rows import FlatImages, RowImages, VisionRules

IMAGE = 99


def flat(rows, sources, sharing=True, has_blocks=False):
    """A flat batch of rows that score all tokens but their first."""
    labels = [[IGNORE_INDEX, *row[1:]] for row in rows]
    return flatten(RowImages(VisionRules(IMAGE, has_blocks), sources), rows, labels, prefix_sharing=sharing)


def flatten(images, rows, labels, **options):
    """The flat batch of rows with these images."""
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    ids, targets = (torch.tensor([[*row, *[0] * (width - len(row))] for row in x]) for x in (rows, labels))
    return images.flatten(ids, mask, targets, **options)


def random_rows(seed):
    """Pairs of rows with up to two images of up to three tokens, some rows with equal images; and their sources."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(4):
        runs = [[IMAGE] * int(rng.integers(1, 4)) for _ in range(int(rng.integers(0, 3)))]
        prompts.append([1, *(t for run in runs for t in (*run, int(rng.integers(2, 4))))])
    prompts.append(prompts[0])
    rows = [prompt + rng.integers(4, 6, rng.integers(1, 4)).tolist() for _ in range(2) for prompt in prompts]
    return rows, [0, 1, 2, 3, 0] * 2


@SHARING
def test_every_row_gets_its_own_features_in_order(prefix_sharing):
    for draw in range(8):
        rows, sources = random_rows(SEED + draw)
        batch = pickle.loads(pickle.dumps(flat(rows, sources, prefix_sharing)))
        assert batch.to_rows() == rows
        # What the model does: write the next feature at each placeholder of the flat row
        index = FlatImages.of(batch).feature_index
        index = torch.arange(FlatImages.of(batch).num_features) if index is None else index
        written = torch.full((batch.input_ids.size(1),), -1)
        written[batch.input_ids[0] == IMAGE] = index
        firsts = np.cumsum([0, *(rows[source].count(IMAGE) for source in range(4))])
        assert FlatImages.of(batch).num_features == firsts[-1]
        for row, source, places in zip(rows, sources, batch.row_index, strict=True):
            got = [int(x) for x in written[places[: len(row)]] if x >= 0]
            assert got == [int(firsts[source]) + k for k in range(row.count(IMAGE))]


def test_rows_share_equal_images_and_no_others():
    rows = [[1, IMAGE, IMAGE, 2, 5], [1, IMAGE, IMAGE, 2, 6]]
    assert flat(rows, [0, 0]).counts.computed == 7  # the last common token is there twice
    assert flat(rows, [0, 1]).counts.computed == 10
    assert flat(rows, [0, 1]).counts.distinct == 9
    # Without sharing, and with images in row order, features need no index
    assert FlatImages.of(flat(rows, [0, 1], sharing=False)).feature_index is None


def test_images_of_many_tokens_are_scored_like_text():
    """No placeholder's label is taken for -100, with features beyond the hundredth."""
    rows = [[1, *[IMAGE] * 150, 2, token] for token in (3, 4)]
    for sources, computed in (([0, 0], 155), ([0, 1], 306)):
        batch = flat(rows, sources)
        assert batch.counts.computed == computed
        assert batch.to_rows() == rows
        for row, path in zip(rows, batch.row_index, strict=True):
            labels = torch.full_like(batch.input_ids[0], IGNORE_INDEX)
            labels[batch.scored_index] = batch.shift_labels[0]
            assert labels[path[:-1]].tolist() == row[1:]


def test_rows_of_one_source_that_were_cut_apart_are_refused_in_words_that_trl_knows():
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        flat([[1, IMAGE, IMAGE, 2], [1, IMAGE]], [0, 0])


def test_grids_are_given_for_each_row():
    """Grids of one, three and two tokens, of four patches each."""
    grids = torch.tensor([[1, 2, 2], [1, 2, 6], [1, 4, 2]])
    rows = [[1, IMAGE, *[IMAGE] * 3], [IMAGE, IMAGE, 7], [2, *[IMAGE] * 4], [3]]
    images = RowImages(VisionRules(IMAGE, patches=4), [0, 1, 0, 2], grids)
    found = FlatImages.of(flatten(images, rows, rows)).grids
    assert found["image_grid_thw"].tolist() == grids[[0, 1, 2, 0, 1]].tolist()
    assert [
        row[mask > 0].tolist() for row, mask in zip(found["input_ids"], found["attention_mask"], strict=True)
    ] == rows
    assert found["mm_token_type_ids"][0].tolist() == [0, 1, 1, 1, 1]
    cut, images = [rows[1], rows[0][:4]], RowImages(images.rules, [0, 1], grids[:2])
    with pytest.raises(ValueError, match="Image features and image tokens do not match, tokens: 5, images end"):
        flatten(images, cut, cut)


@pytest.mark.parametrize("limit", [3, 4])
def test_blocks_that_a_window_does_not_cut_are_refused_beyond_it(limit):
    """As in Gemma 4 Unified: a block of four tokens, and one of two."""
    rows, rules = [[5, *[IMAGE] * 4, 5, IMAGE, IMAGE]], VisionRules(IMAGE, has_blocks=True, longest_block=limit)
    images = RowImages(rules, [0])
    if limit == 4:
        assert flatten(images, rows, rows).layout.blocks.tolist() == [-1, 1, 1, 1, 1, -1, 6, 6]
    else:
        with pytest.raises(ValueError, match="An image has 4 tokens, and in layers with `sliding_window=3`"):
            flatten(images, rows, rows)


# --- which rows have equal images -----------------------------------------------------------------------------------


def test_rows_with_equal_images_are_found():
    """Several entries per row, or none, and arguments that only together tell images apart."""
    for draw, dtype in enumerate([torch.float32, torch.bfloat16, torch.int64] * 3):
        rng = np.random.default_rng(SEED + draw)
        known = [(rng.normal(size=(n, 3, 2)), rng.integers(0, 2, (1, 2))) for n in (0, 1, 2, 2)]
        known.append((known[2][0], known[2][1] + 1))
        drawn = rng.integers(0, len(known), 12)
        pixels, sizes = (torch.from_numpy(np.concatenate([known[i][part] for i in drawn])) for part in range(2))
        cuts = {"pixel_values": [len(known[i][0]) for i in drawn], "image_sizes": [1] * len(drawn)}
        found = equal_images({"pixel_values": (100 * pixels).to(dtype), "image_sizes": sizes}, cuts)
        assert found == [drawn.tolist().index(i) for i in drawn]


def test_images_with_equal_sums_are_told_apart():
    pixels = torch.tensor([[1.0, 2.0], [2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    assert equal_images({"pixel_values": pixels}, {"pixel_values": [1] * 4}) == [0, 1, 2, 0]
    assert equal_images({"pixel_values": pixels[:0]}, {"pixel_values": [0, 0]}) == [0, 0]


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_block_see_each_other_in_every_row(window):
    for draw in range(4):
        rows, sources = random_rows(SEED + draw)
        batch = flat(rows, sources, has_blocks=True)
        whole = dense_mask(batch.layout, window, torch.float32)[0, 0] == 0
        for row, path in zip(rows, batch.row_index, strict=True):
            path, inside = path[: len(row)], np.array(row) == IMAGE
            runs, (q, k) = np.cumsum(np.diff(inside, prepend=False)), np.indices((len(row), len(row)))
            same = inside[q] & inside[k] & (runs[q] == runs[k])
            expected = ((k <= q) | same) & (window is None or k > q - window)
            assert (whole[path[:, None], path].numpy() == expected).all()


def test_segments_of_equal_shape_have_masks_of_their_own_where_blocks_differ():
    batch = flat([[1, IMAGE, IMAGE, 2], [1, 3, IMAGE, IMAGE]], [0, 1], sharing=False, has_blocks=True)
    first, second = masks_of_calls(batch.layout, None, None)
    assert first[0, 0, 1, 2]
    assert not second[0, 0, 1, 2]
    assert masks_of_calls(batch.layout.without_blocks(), None, None) == [None]
