"""Segments cut at forks, in the order in which a state can go on, and the axis on which convolutions see their past."""

import numpy as np
import pytest

from tests.helpers.tiny import SEED
from tests.helpers.trees import random_segments
from trl_paddingfree import Segments
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.recurrent.pieces import Context, Pieces
from trl_paddingfree.spans import View


@pytest.mark.parametrize("draw", range(SEED, SEED + 20))
def test_paths_of_pieces_are_the_paths_of_their_tokens(draw):
    segments = random_segments(draw)
    firsts, lengths, parents, depths, before = View.of(segments, 0, segments.num_tokens).pieces
    paths = []
    for first, length, parent, depth, token in zip(firsts, lengths, parents, depths, before, strict=True):
        assert token == (-1 if parent == -1 else paths[parent][-1])
        own = np.arange(first, first + length)
        assert depth == (0 if parent == -1 else depths[parent] + 1)
        paths.append(own if parent == -1 else np.concatenate([paths[parent], own]))
    ends = {path[-1]: path for path in paths}
    for i, offset in enumerate(segments.offsets[1:]):  # each segment ends where one of its pieces does
        assert ends[offset - 1].tolist() == segments.path(i).tolist()
    assert sorted(np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)])) == [
        *range(segments.num_tokens)
    ]


@pytest.mark.parametrize("step_cost", [None, 0.0, 1.0, 1e9])
@pytest.mark.parametrize("draw", range(SEED, SEED + 10))
def test_each_token_has_one_slot_and_each_piece_starts_where_its_parent_ends(draw, step_cost):
    layout = FlatLayout.from_segments(random_segments(draw))
    pieces = Pieces.of(layout, step_cost)
    slots = pieces.slots.index.clone()
    if pieces.slots.empty is not None:
        slots[pieces.slots.empty] = -1
    assert slots[pieces.own.index].tolist() == list(range(len(pieces.own.index)))
    assert (slots >= 0).sum() == len(pieces.own.index)
    parts = iter(slots.split([n * longest for level in pieces.levels for n, longest in (call.shape for call in level)]))
    before, paths = [], {}
    for level in pieces.levels:
        found = []
        for call in level:
            part = next(parts)
            rows = part.view(call.shape) if step_cost is not None else part.tensor_split(call.boundaries[1:-1].long())
            starts = [None] * len(rows) if call.parents is None else call.parents.index.tolist()
            for row, start in zip(rows, starts, strict=True):
                own = row[row >= 0].tolist()
                assert row[: len(own)].tolist() == own  # padded on the right
                found.append(own if start is None else before[start] + own)
        paths |= {path[-1]: path for path in found}
        before = found
    for i, offset in enumerate(layout.segments.offsets[1:]):
        assert paths[offset - 1] == layout.segments.path(i).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("draw", range(SEED, SEED + 5))
def test_the_tokens_before_a_token_are_those_of_its_own_path(draw, is_whole, size):
    """In a slice, with the states of the tokens before it behind its own, wherever it begins and ends."""
    layout = FlatLayout.from_segments(random_segments(draw))
    segments, total = layout.segments, layout.segments.num_tokens
    first, last = sorted(np.random.default_rng(draw).choice(total + 1, 2, replace=False).tolist())
    span = range(total) if is_whole else range(first, last)
    before = View.of(segments, span.start, span.stop).before(size)
    assert (np.diff(before) > 0).all()
    assert (before < span.start).all()
    context, tokens = Context.of(layout, size, span), np.array([*span, *before])
    own = tokens[context.rows.index]
    if context.rows.empty is not None:
        own[context.rows.empty] = -1
    assert set(before) <= set(own.tolist())
    paths = [np.append([-1] * size, segments.path(i)) for i in layout.seq_idx[0]]  # of each token
    for token, place in zip(span, context.places.tolist(), strict=True):
        end = segments.position_ids[token] + size + 1
        assert own[place - size : place + 1].tolist() == paths[token][end - size - 1 : end].tolist()


def test_what_shares_nothing_is_one_level():
    assert len(Pieces.of(FlatLayout.from_segments(Segments.from_lengths([3, 5, 3])), 1.0).levels) == 1
