"""What every flat batch holds, whatever its rows: each is a bug of padding-free training elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tiny import SEED, SHARING
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.flat.counts import TokenCounts

ROWS = [[5, 6, 7, 8, 9], [5, 6, 10], [11, 12], [5, 6, 7, 13]]


def random_batches(**options):
    """Flat batches of random rows over two tokens, every token of which is scored."""
    rng = torch.Generator().manual_seed(SEED)
    for _ in range(30):
        sizes = torch.randint(0, 9, (5,), generator=rng).tolist()
        rows = [torch.randint(0, 2, (n,), generator=rng).tolist() for n in sizes]
        yield rows, FlatBatch.from_rows(rows, rows, **options)


@SHARING
def test_the_first_token_of_a_sequence_is_never_a_target(prefix_sharing):
    """trl#4170, also fla#1217: a label at the boundary between two documents."""
    for rows, batch in random_batches(prefix_sharing=prefix_sharing):
        if sum(map(len, rows)) == 0 or batch.shift_labels[0, 0] == -100:
            continue
        ids, segment = batch.input_ids[0], batch.layout.seq_idx[0]
        following = batch.scored_index + 1
        assert torch.equal(ids[following], batch.shift_labels[0])
        assert torch.equal(segment[following], segment[batch.scored_index])
        assert (batch.position_ids[0][following] > 0).all()


@pytest.mark.parametrize("multiple", [None, 8])
def test_kernels_get_one_row_and_boundaries_that_close_at_its_last_token(multiple):
    """
    transformers#39121: more rows than one. flash-attention#2324, also pytorch#176793, #186786, #188933: gradients of
    tokens beyond the last boundary are not initialised. flash-attention#443, also #1778: queries of a segment with
    fewer keys see nothing, and their gradients are NaN.
    """
    for _, batch in random_batches(pad_to_multiple_of=multiple):
        layout = batch.layout
        assert {len(x) for x in (batch.input_ids, batch.position_ids, batch.shift_labels)} == {1}
        assert layout.cu_seqlens_q[-1] == batch.input_ids.size(1)
        keys = batch.input_ids.size(1) if layout.kv_index is None else len(layout.kv_index)
        assert layout.cu_seqlens_k[-1] == keys
        assert (layout.cu_seqlens_q.diff() <= layout.cu_seqlens_k.diff()).all()


def test_counts_are_gathered_on_the_models_device():
    """trl#3244."""
    devices = []
    gather = lambda tensor: devices.append(tensor.device.type) or torch.zeros_like(tensor, device="cpu")  # noqa: E731
    accelerator = SimpleNamespace(device=torch.device("meta"), gather=gather, num_processes=2)
    TokenCounts().figures(accelerator, memory=0, repeats=False)
    assert devices == ["meta"]


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_value_of_one_row_stays_out_of_the_padding_of_others(value):
    batch = FlatBatch.from_rows(ROWS, ROWS, prefix_sharing=False)
    real = batch.row_mask[:, :-1] & batch.row_mask[:, 1:]
    sizes = len(batch.scored_index), batch.input_ids.size(1)
    scored, tokens = (torch.zeros(1, n).index_fill(1, torch.tensor(0), value) for n in sizes)
    assert batch.scored_to_rows(scored)[~real].eq(0).all()
    assert batch.tokens_to_rows(tokens[..., None])[~batch.row_mask].eq(0).all()
