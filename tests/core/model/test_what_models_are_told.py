"""What layers, kernels and generation are told of a flat batch: each is a bug of padding-free training elsewhere."""

import gc
import weakref

import pytest
import torch
from transformers import AttentionMaskInterface

from tests.helpers.architectures import with_head
from tests.helpers.flat_and_padded import flat_model, install
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import ATTENTIONS, make_model
from trl_paddingfree import FlatBatch
from trl_paddingfree.core import upstream
from trl_paddingfree.core.check.prove import check_flat
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.model.told import FlatMask

ROWS = [[5, 6, 7, 8, 9], [5, 6, 10], [11, 12], [5, 6, 7, 13]]


def make(**options):
    model = make_model(**options)
    flat_model(model)
    return model


def log_probs(model, batch, rows):
    width = batch.row_index.size(1)
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    return model(flat_batch=batch, labels=labels, fused_lm_head=True, use_cache=False).log_probs


def test_no_2d_mask_reaches_the_model():
    """trl#3673."""
    model, seen = make(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    assert [type(mask) for mask in seen] == [FlatMask, FlatMask]


def test_no_dense_mask_is_made(monkeypatch):
    """transformers#41856."""
    model, batch = make(), FlatBatch.from_rows(ROWS, ROWS, prefix_sharing=False)
    made, original = [], torch.nn.functional.scaled_dot_product_attention

    def attend(*args, attn_mask=None, **kwargs):
        made.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    log_probs(model, batch, ROWS)
    assert len(made) == 2 * len(ROWS)
    assert all(mask is None for mask in made)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4", "kernels-community/x"])
def test_every_flash_attention_gets_boundaries(name, monkeypatch):
    """trl#3942."""
    model, calls = with_head(make_model()), []
    AttentionMaskInterface.register(name, AttentionMaskInterface()["flash_attention_2"])  # as loading a kernel does
    upstream.set_attn_implementation(model, name)
    attend = lambda query, *args, **kwargs: calls.append(kwargs) or torch.zeros_like(query)  # noqa: E731
    monkeypatch.setattr(upstream, "flash_attention_forward", attend)
    batch = FlatBatch.from_rows(ROWS, ROWS)
    install(model)
    log_probs(model, batch, ROWS)
    assert [call["attn_implementation"] for call in calls] == [name, name]
    for call in calls:
        assert torch.equal(call["cu_seq_lens_q"], batch.layout.cu_seqlens_q)
        assert torch.equal(call["cu_seq_lens_k"], batch.layout.cu_seqlens_k)
        assert (call["max_length_q"], call["max_length_k"]) == (5, 5)


def test_no_segment_is_empty():
    """flash-attention#1254, also #1537 (a longest sequence of one token beside an empty one), #2562, #2568."""
    for rows in ([[]], [[], [3], []], [[3], [4]], [[], []]):
        batch = FlatBatch.from_rows(rows, rows)
        assert min(batch.layout.segments.lengths) >= 1
        with reference_flash():
            model = make_model(attn_implementation="flash_attention_2")
            flat_model(model)
            values = log_probs(model, batch, rows)
        assert values.isfinite().all()


def test_padding_to_a_multiple_changes_nothing():
    """trl#3996."""
    model = make()
    expected = log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    padded = FlatBatch.from_rows(ROWS, ROWS, pad_to_multiple_of=16)
    assert padded.input_ids.size(1) % 16 == 0
    torch.testing.assert_close(log_probs(model, padded, ROWS), expected)


def test_a_batch_without_a_scored_token_has_a_loss_of_zero_and_a_gradient():
    """trl#6321."""
    model = make()
    nothing = [[-100] * len(row) for row in ROWS]
    total = log_probs(model, FlatBatch.from_rows(ROWS, nothing), nothing).sum()
    total.backward()
    assert total == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_generation_is_untouched():
    """transformers#32487."""
    model = make_model()
    prompt = {"input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    expected = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    flat_model(model)
    log_probs(model, FlatBatch.from_rows(ROWS, ROWS), ROWS)
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), expected)


def test_what_is_derived_of_a_batch_goes_with_it():
    """unsloth#7678, also unsloth#4243, host and device waiting for each other in every layer: see `test_gpu`."""
    model, batch = make(), FlatBatch.from_rows(ROWS, ROWS)
    log_probs(model, batch, ROWS).sum().backward()
    assert batch.layout._derived
    layout = weakref.ref(batch.layout)
    del batch
    gc.collect()
    assert layout() is None


@ATTENTIONS
def test_documents_are_apart_without_flash_attention(attention):
    """trl#3910."""
    model = make(attn_implementation=attention)
    assert check_flat(model, choose_route(model).without_sharing()).leak == 0
