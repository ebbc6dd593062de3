"""Calls of attention: every segment once, its keys beside it, and padding that costs less than calls."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trl_paddingfree.core.flat.calls import PADDED_SHARE, PAIRS_OF_A_CALL, AttentionCalls, segments_of_like_shape
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.flat.segments import share_prefixes

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=16)


@given(rows=ROWS)
@example(rows=[[0] * 20] + [[0] * n + [1, 1] for n in range(16, 8, -1)])  # padded keys, queries as they lie
@settings(deadline=None)
def test_each_token_is_answered_from_its_own_path(rows):
    """Queries and keys of the calls, compared with the definition of a path."""
    layout = FlatLayout.from_segments(share_prefixes([np.array(row) for row in rows])[0])
    segments, calls = layout.segments, AttentionCalls.of(layout)
    assert sorted(i for call in calls.segments for i in call) == list(range(len(segments.lengths)))
    every, gathered = np.arange(segments.num_tokens), (calls.query_rows, calls.answers, calls.key_rows)
    queries, answers, keys = (every if rows is None else rows.index.numpy() for rows in gathered)
    assert (queries[answers] == every).all()
    first_query = first_key = 0
    for call, most_queries, most_keys in zip(calls.segments, calls.queries, calls.keys, strict=True):
        for i in call:
            path = segments.path(i)
            assert (keys[first_key:][: len(path)] == path).all()
            assert (queries[first_query:][: segments.lengths[i]] == path[segments.starts[i] :]).all()
            first_query, first_key = first_query + most_queries, first_key + most_keys
    assert (len(queries), len(keys)) == (first_query, first_key)


@given(data=st.data())
@settings(deadline=None)
def test_padding_costs_less_than_the_calls_that_it_saves(data):
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=24))
    starts = [data.draw(st.sampled_from([0, 0, 1, 60, 300])) for _ in lengths]
    keys = [start + length for start, length in zip(starts, lengths, strict=True)]
    groups = segments_of_like_shape(lengths, keys)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len({starts[i] > 0 for i in group}) == 1, "those that need a mask, and those that need none"
        computed = len(group) * max(lengths[i] for i in group) * max(keys[i] for i in group)
        pairs = [lengths[i] * keys[i] for i in group]
        assert computed - sum(pairs) <= min(PAIRS_OF_A_CALL * (len(group) - 1), PADDED_SHARE * sum(pairs))
