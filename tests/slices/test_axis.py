"""Cuts of a flat axis: what each slice reads and keeps, against the definition of a path."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.trees import random_segments
from trl_paddingfree import Segments
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.flat.segments import something_to_compute
from trl_paddingfree.slices.axis import cut_by_size, kept_keys, slices_of
from trl_paddingfree.spans import NO_WINDOW, cut_by_number

seeds, sizes = st.integers(0, 10**6), st.integers(1, 80)


def random_cuts(seed, total):
    """Cuts of an axis, of which some may lie at one place."""
    rng = np.random.default_rng(seed)
    return (0, *sorted(rng.integers(0, total + 1, rng.integers(0, 9)).tolist()), total)


def keys_of(slices):
    """The flat positions of the keys that each slice kept, and of those that it has."""
    kept, had = [], []
    for part in slices:
        own = np.arange(part.span.start, part.span.stop)
        kept.append(own if part.keeps is None else own[part.keeps.numpy()])
        had.append(np.concatenate([*(kept[i] for i in part.reads), own]))
    return kept, had


def mask_of(layout, window):
    """`(queries, keys)` bool: what queries of a layout see in a window, by the keys that attention gathers for runs."""
    segments = layout.segments
    index = np.arange(segments.num_keys) if layout.kv_index is None else layout.kv_index.numpy()
    runs = np.split(index, np.cumsum(segments.key_lengths)[:-1])
    rows = (
        np.isin(np.arange(segments.num_keys), keys[max(seen - window, 0) : seen])
        for keys, length in zip(runs, segments.lengths, strict=True)
        for seen in range(len(keys) - length + 1, len(keys) + 1)
    )
    return np.array([*rows])


def dense_mask(segments, window):
    """What each token sees, by the definition of a path and its positions."""
    positions = segments.position_ids
    return segments.dense_mask() & (positions > positions[:, None] - window)


windows = st.sampled_from([1, 2, 5, 12, NO_WINDOW])


@given(seeds, st.booleans(), windows)
@settings(max_examples=300, deadline=None)
def test_each_slice_sees_what_the_whole_sees(seed, with_reach, window):
    segments = random_segments(seed)
    cuts, whole = random_cuts(seed, segments.num_tokens), dense_mask(segments, window)
    slices = slices_of(FlatLayout.from_segments(segments), cuts, with_reach, window)
    total = segments.num_tokens
    assert [part.span for part in slices] == [something_to_compute(*ends, total) for ends in pairwise(cuts)]
    kept, had = keys_of(slices)
    number, before = kept_keys(segments, cuts, np.array([window]))
    assert number == sum(map(len, kept))
    for part, keys, most in zip(slices, had, before[0].tolist(), strict=True):
        made = part.layout.segments
        assert made.num_tokens == part.span.stop - part.span.start + with_reach
        assert made.num_keys == len(keys) + with_reach
        seen, expected = mask_of(part.layout, window), whole[part.span.start : part.span.stop]
        if with_reach:  # a row of its own, which nothing else sees
            assert np.flatnonzero(seen[-1]).tolist() == [len(keys)]
            assert not seen[:-1, -1].any()
            seen = seen[:-1, :-1]
        assert np.array_equal(seen, expected[:, keys])
        assert expected[:, : part.span.start].any(0).sum() <= most
        assert expected.sum() == seen.sum()  # there is no other that it sees
        positions = segments.position_ids[part.span.start : part.span.stop]
        if window == NO_WINDOW:
            assert made.position_ids[: len(positions)].tolist() == positions.tolist()
        for earlier in part.reads:
            assert expected[:, cuts[earlier] : cuts[earlier + 1]].any()
    for (_, end), keys in zip(pairwise(cuts), kept, strict=True):  # nothing is kept that no later slice reads
        assert whole[end:, keys].any(0).all()


@pytest.mark.parametrize("with_reach", [False, True])
def test_kernels_are_told_of_keys_before_a_single_run(with_reach):
    """All keys of the axis are those of its one run, in their order: nothing is gathered, and yet keys are more."""
    *_, last = slices_of(FlatLayout.from_segments(Segments.from_lengths([9])), (0, 4, 9), with_reach)
    assert last.layout.cu_seqlens_q.tolist() == [0, 5, 6][: 2 + with_reach]
    assert last.layout.cu_seqlens_k.tolist() == [0, 9, 10][: 2 + with_reach]


@given(seeds, sizes)
@example(102, 8)  # one token more than a slice, of which two must be left, and a segment ends near
@settings(max_examples=200, deadline=None)
def test_cuts_by_size_keep_it_and_the_last_slice_has_most(seed, size):
    segments = random_segments(seed)
    lengths, size = np.diff(cut_by_size(segments, size)), max(size, 2)
    least = size - max(size // 8, 1)
    assert lengths.sum() == segments.num_tokens
    assert min(2, segments.num_tokens) <= lengths.min() <= lengths.max() <= max(size, 3)  # three tokens are not cut
    assert len(lengths) <= -(-segments.num_tokens // max(least, 2))
    assert lengths[-1] >= min(least, segments.num_tokens)


@given(st.integers(1, 60), st.integers(1, 80))
def test_cuts_by_number_are_so_many_of_about_one_size(total, number):
    lengths = np.diff(cut_by_number(total, number))
    assert (len(lengths), lengths.sum()) == (number, total)
    assert 1 not in lengths or total == 1
    assert lengths.max() - lengths.min() <= (1 if total >= 2 * number else 3)


@given(seeds, sizes)
@settings(max_examples=100, deadline=None)
def test_blocks_of_an_image_are_never_cut(seed, size):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, 6).tolist()
    blocks = np.repeat([i if rng.random() < 0.6 else -1 for i in range(6)], lengths)
    segments = Segments.from_lengths([sum(lengths)])
    inside = np.flatnonzero((blocks[1:] == blocks[:-1]) & (blocks[1:] >= 0)) + 1
    assert np.diff(cut_by_size(segments, size, blocks)).max() <= max(size, 3, *lengths) + 1  # no token stands alone
    for cuts in (cut_by_size(segments, size, blocks), cut_by_number(segments.num_tokens, size, blocks)):
        assert (cuts[0], cuts[-1]) == (0, segments.num_tokens)
        assert not set(cuts) & set(inside.tolist())
        assert list(cuts) == sorted(cuts)
        layout = FlatLayout.from_segments(segments, blocks)
        _, had = keys_of(slices_of(layout, cuts))
        for part, keys in zip(slices_of(layout, cuts), had, strict=True):
            made = part.layout.blocks
            assert (made is None and (blocks[keys] < 0).all()) or torch.equal(made, torch.from_numpy(blocks[keys]))
