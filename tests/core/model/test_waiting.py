"""The host never reads the device inside the flat model, and no tensor is left on another one.

Tensors on PyTorch's meta device have no values and mix with those of no other device, so whatever makes a GPU wait
raises here, forward and backward.
"""

from unittest import mock

import pytest
import torch

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.tiny import SHARING
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model import flat_model as of_model

# model types and what is special: windows, soft-capping, sinks, chunks, experts, compressed keys, layers with a state
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {},
    "gpt_oss": {},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "falcon_h1": {},
    "lfm2": {},
    "mamba2": {},
    "jamba": {},
    "falcon": {},
}
ROWS = [[5, 6, 7, 8, 9, 1], [5, 6, 7, 2], [5, 6, 7, 8, 3, 3, 3], [4], [11] * 20]


@pytest.fixture
def comparison(monkeypatch):
    """The comparison of rows with their batch, on the device: on a GPU, the host asks for it and goes on."""
    watched = mock.Mock(wraps=of_model.edits)
    monkeypatch.setattr(of_model, "edits", watched)
    return watched


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@SHARING
@pytest.mark.parametrize("name", MODELS)
def test_nothing_inside_the_flat_model_needs_a_value(comparison, name, prefix_sharing, checkpointing):
    # On the CPU, experts compute in float32 by a route that meta tensors cannot take
    model = tiny_model(name, dtype=torch.bfloat16, **MODELS[name]).train()
    flat_model(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.to("meta")
    batch = FlatBatch.from_rows(ROWS, ROWS, prefix_sharing=prefix_sharing).to("meta")
    rows = {name: torch.zeros(len(ROWS), 20, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}

    logits = model(**rows, flat_batch=batch, use_cache=False).logits
    logits.sum().backward()

    comparison.assert_called_once()
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"meta"}
    assert logits.shape == (len(ROWS), 20, model.config.vocab_size)


def test_batches_that_differ_anywhere_have_different_checksums():
    unscored = [[-100] * len(row) for row in ROWS]
    others = [[*ROWS[:-1], [11] * 19 + [12]], [*ROWS[:-1], [11] * 19], [*reversed(ROWS)]]
    batches = [FlatBatch.from_rows(rows, rows) for rows in (ROWS, *others)]
    batches += [FlatBatch.from_rows(ROWS, ROWS, width=21), FlatBatch.from_rows(ROWS, unscored)]
    assert len({batch.checksum for batch in batches}) == len(batches)
    assert FlatBatch.from_rows(ROWS, ROWS).checksum == batches[0].checksum
