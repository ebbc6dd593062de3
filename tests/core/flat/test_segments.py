"""The value objects: what is derived from lengths, parents and starts, against their definitions."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors

from trl_paddingfree import FlatBatch, Segments
from trl_paddingfree.core.flat import transfer
from trl_paddingfree.core.flat.layout import Gather
from trl_paddingfree.core.flat.segments import KEYS_OF_A_TOKEN, num_distinct_tokens, share_prefixes

# Few different tokens and short rows: prefixes, identical rows and rows that are prefixes of others are common
rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=9), min_size=1, max_size=8)


def labels_of(rows, scored_from):
    return [[-100 if i < scored_from else token for i, token in enumerate(row)] for row in rows]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (((3, 0), (-1, -1), (0, 0)), "Segment 1 has length 0"),
        (((3, 2), (-1, 1), (0, 1)), "Segment 1 has parent 1"),
        (((3, 2), (-1, 0), (0, 4)), "Segment 1 starts at 4"),
        (((3, 2), (-1, -1), (0, 1)), "Segment 1 starts at 1"),
        (((3,), (-1, -1), (0,)), "is longer than argument 1"),
    ],
)
def test_invalid_segments_are_refused_by_name(segments, message):
    with pytest.raises(ValueError, match=message):
        Segments(*segments)


@given(rows_of_tokens, st.booleans(), st.integers(0, 4), st.sampled_from([None, 1, 8]))
@settings(max_examples=300, deadline=None)
def test_rows_survive_the_round_trip(rows, prefix_sharing, scored_from, multiple):
    batch = FlatBatch.from_rows(
        rows, labels_of(rows, scored_from), prefix_sharing=prefix_sharing, pad_to_multiple_of=multiple
    )
    assert batch.to_rows() == rows
    assert batch.input_ids.size(1) == batch.counts.computed == batch.layout.segments.num_tokens
    if multiple:
        assert batch.counts.computed % multiple == 0


@given(rows_of_tokens)
@settings(max_examples=300, deadline=None)
def test_every_path_spells_its_row_and_shares_all_but_the_forks(rows):
    rows = [np.asarray(row) for row in rows if row]
    if not rows:
        return
    segments, ends, flat = share_prefixes(rows)
    for row, segment in zip(rows, ends, strict=True):
        path = segments.path(segment)[: len(row)]
        assert flat[path].tolist() == row.tolist()
        assert segments.position_ids[path].tolist() == list(range(len(row)))
    # The limit is one node per distinct prefix; a branch costs at most one token more
    distinct = len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
    assert num_distinct_tokens(rows) == distinct
    # (two rows that share one token only are two roots, and that token is there twice)
    assert distinct <= len(flat) <= distinct + len(segments.lengths) - 1


@given(rows_of_tokens)
@settings(max_examples=200, deadline=None)
def test_kv_index_and_dense_mask_agree_with_the_definition(rows):
    batch = FlatBatch.from_rows(rows, labels_of(rows, 1))
    segments, mask = batch.layout.segments, batch.layout.segments.dense_mask()
    kv_index = segments.kv_index if segments.is_shared else np.arange(segments.num_tokens)
    for i, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
        keys = kv_index[segments.cu_seqlens_k[i] : segments.cu_seqlens_k[i + 1]]
        for k in range(length):
            # causal, aligned to the bottom right
            assert set(np.flatnonzero(mask[segments.offsets[i] + k])) == set(keys[: start + k + 1])
    for row in range(len(rows)):
        path = batch.row_index[row][batch.row_mask[row]].numpy()
        assert (mask[np.ix_(path, path)] == np.tril(np.ones((len(path), len(path)), bool))).all()


@given(rows_of_tokens, st.integers(0, 4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_scored_token_comes_back_to_every_row_that_scores_it(rows, scored_from, prefix_sharing):
    labels = labels_of(rows, scored_from)
    batch = FlatBatch.from_rows(rows, labels, prefix_sharing=prefix_sharing)
    width = max(map(len, rows))
    found = batch.scored_to_rows((batch.shift_labels + 1000).double())
    for row, label in enumerate(labels):
        for i in range(width - 1):
            scored = i + 1 < len(label) and label[i + 1] != -100
            if scored:
                assert found[row, i] == label[i + 1] + 1000
            elif i + 1 >= len(label):
                assert found[row, i] == 0


def test_a_row_with_labels_of_the_users_own_shares_nothing_and_the_others_do():
    rows, labels = [[1, 2, 3], [1, 2, 4], [1, 2, 5]], [[-100, 7, 3], [-100, 2, 4], [-100, 2, 5]]
    batch = FlatBatch.from_rows(rows, labels)
    assert batch.layout.segments == Segments((3, 2, 3), (-1, 0, -1), (0, 1, 0))
    assert batch.input_ids.tolist() == [[1, 2, 4, 2, 5, 1, 2, 3]]
    assert batch.scored_to_rows(batch.shift_labels).tolist() == [[7, 3], [2, 4], [2, 5]]
    assert batch.to_rows() == rows
    assert (batch.counts.computed, batch.counts.distinct) == (8, 7)
    assert FlatBatch.from_rows(rows[:2], labels[:2]).layout.segments.lengths == (3, 3)


def rows_with(prefix, length, number, first=0):
    """Rows that have their first tokens in common, and no others."""
    return [[*range(prefix), *([first + n] * (length - prefix))] for n in range(1000, 1000 + number)]


@pytest.mark.parametrize(
    ("rows", "branches"),
    [
        (rows_with(2, 1000, 8), 0),  # that would save 7 tokens, and gather 8,000 keys
        (rows_with(32, 1000, 2), 0),  # 31 tokens, and 2,000 keys
        (rows_with(33, 1000, 2), 1),
        (rows_with(33, 1000, 2) + [[5 + n] * 1000 for n in range(2000, 2100)], 0),  # 32 tokens, and 102,000 keys
        (rows_with(500, 1000, 2) + rows_with(2, 1000, 6, 50), 1),
    ],
    ids=["2 of 1,000", "32 of 1,000", "33 of 1,000", "beside many", "beside a long one"],
)
def test_a_prefix_is_shared_if_that_saves_more_than_its_keys_cost(rows, branches):
    batch = FlatBatch.from_rows(rows, rows)
    assert sum(start > 0 for start in batch.layout.segments.starts) == branches
    assert batch.to_rows() == rows
    saved, keys = sum(batch.layout.segments.starts), sum(batch.layout.segments.key_lengths)
    assert not branches or saved * KEYS_OF_A_TOKEN >= keys


def test_a_row_that_another_goes_on_from_costs_no_keys_however_short_it_is():
    rows = [[1, 2], [1, 2, *range(10, 1010)]]
    assert FlatBatch.from_rows(rows, rows).layout.segments == Segments.from_lengths([1002])


def test_padding_is_one_segment_of_no_row():
    """
    LLaMA-Factory#10736, also #7318, and VeOmni#746, #136, #845: padding with position 0 makes one sequence of every
    padding token.
    """
    batch = FlatBatch.from_rows([[5, 6, 7]], [[5, 6, 7]], pad_to_multiple_of=8, pad_token_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, 9, 9, 9, 9]]
    assert batch.layout.segments.lengths == (3, 5)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.token_rows.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_a_batch_moves_and_pickles_as_one_thing():
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    batch = FlatBatch.from_rows(rows, rows).to("cpu")
    again = pickle.loads(pickle.dumps(batch))
    assert again.to_rows() == rows
    assert again.layout.segments == batch.layout.segments
    meta = replace(batch, mismatched=batch).to("meta")
    moved = (meta.input_ids, meta.layout.kv_index, meta.layout.kv_gather.order, meta.mismatched.input_ids)
    assert {tensor.device for tensor in moved} == {torch.device("meta")}


def test_engines_that_make_all_arguments_anew_leave_a_batch_whole():
    """FSDP does, to cast what is floating: no tensor of a batch is."""
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    batch = FlatBatch.from_rows(rows, rows)
    assert batch.layout.derived("something", object)
    anew = _apply_to_tensors(lambda x: x.bfloat16() if x.is_floating_point() else x, {"flat_batch": batch})[
        "flat_batch"
    ]
    for a, b in zip(batch._tensors(), anew._tensors(), strict=True):
        assert a is b
    assert anew.layout.segments == batch.layout.segments


def test_what_the_data_loader_has_pinned_is_not_pinned_again(monkeypatch):
    """By stand-ins, as pages are locked for accelerators only."""
    batch = FlatBatch.from_rows([[1, 2, 3, 4, 5], [1, 2, 6]], [[-100, 2, 3, 4, 5], [-100, 2, 6]])
    monkeypatch.setattr(transfer, "_is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    packings, pack = [], transfer._packed
    monkeypatch.setattr(transfer, "_packed", lambda tensors: packings.append(1) or pack(tensors))
    pinned = batch.pin_memory()
    assert pinned.to_rows() == batch.to_rows()
    moved = pinned.to("meta")
    assert len(packings) == 1
    assert moved.layout.kv_index.shape == batch.layout.kv_index.shape
    batch.to("meta")
    assert len(packings) == 2


@pytest.mark.parametrize("branches", [2, 7])
def test_gradient_of_the_gather_is_the_sum_over_copies(branches):
    rows = [[1, 2, 3, 4, 10 + b, 5] for b in range(branches)]
    layout = FlatBatch.from_rows(rows, rows).layout
    states = torch.randn(layout.segments.num_tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(layout.kv_index), 2, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad((states[layout.kv_index] * weights).sum(), states)
    (actual,) = torch.autograd.grad((Gather.apply(states, layout.kv_gather) * weights).sum(), states)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)  # the same float64 sums, in another order
