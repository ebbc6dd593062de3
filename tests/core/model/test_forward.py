"""The flat forward against each row run alone: logits, gradients, counts."""

import copy
import types
from dataclasses import replace

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.architectures import tiny_model, with_head, with_values
from tests.helpers.flat_and_padded import flat_model, install, noise_of, padded_rows
from tests.helpers.tiny import REENTRANT, make_model
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route, choose_route

# float64 on CPU: rounding of sums over at most a few hundred terms of order one
FLOAT64 = 1e-10
# TRL's head accumulates its statistics in float32, whatever the model's dtype, as eager attention does its softmax
FLOAT32 = 1e-5
ROUTES = [
    Route("segment", "sdpa", prefix_sharing=True),
    Route("segment", "eager", prefix_sharing=True),
    Route("mask", "sdpa", prefix_sharing=True),
]

tokens = st.integers(1, 4)
trees = st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=ROUTES, ids=lambda r: f"{r.backend}-{r.loaded_with}")
def double_model(request):
    model = make_model(dtype=torch.float64, attn_implementation=request.param.loaded_with, vocab_size=8)
    outputs = ("log_probs", "entropy", "is_top1")
    return FlatModel.install(with_head(model, outputs=outputs), request.param).model


@given(rows=trees, prefix_sharing=st.booleans(), multiple=st.sampled_from([None, 8]))
@example(rows=[[1, 1, 1], [1] * 8], prefix_sharing=True, multiple=None)  # eager differs from itself alone by 4e-7
@settings(max_examples=40, deadline=None)
def test_flat_logits_equal_each_row_alone(double_model, rows, prefix_sharing, multiple):
    batch = FlatBatch.from_rows(rows, rows, prefix_sharing=prefix_sharing, pad_to_multiple_of=multiple)
    tolerance = FLOAT32 if FlatModel.of(double_model).route.loaded_with == "eager" else FLOAT64
    with torch.no_grad():
        for row, flat in zip(rows, double_model(flat_batch=batch).logits, strict=True):
            alone = double_model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            assert (flat[: len(row)] - alone).abs().max() < tolerance
            assert (flat[len(row) :] == 0).all()


@given(rows=trees, prefix_sharing=st.booleans(), scored_from=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_flat_log_probs_and_gradients_equal_padded(double_model, rows, prefix_sharing, scored_from):
    labels = [[-100 if i < scored_from else t for i, t in enumerate(row)] for row in rows]
    inputs = padded_rows(rows, labels)
    batch = FlatBatch.from_rows(rows, labels, prefix_sharing=prefix_sharing)
    expected = double_model(**inputs, fused_lm_head=True, use_cache=False)
    actual = double_model(**inputs, flat_batch=batch, fused_lm_head=True, use_cache=False)
    assert (actual.label_mask == expected.label_mask).all()
    for name in ("log_probs", "entropy", "is_top1"):
        assert getattr(actual, name).dtype == getattr(expected, name).dtype
        difference = getattr(actual, name).double() - getattr(expected, name).double()
        assert difference.abs().sum() <= FLOAT32 * max(1, difference.numel())
    weights = torch.rand_like(expected.log_probs)
    parameters = list(double_model.parameters())
    ours = torch.autograd.grad((actual.log_probs * weights).sum(), parameters)
    for a, b in zip(ours, torch.autograd.grad((expected.log_probs * weights).sum(), parameters), strict=True):
        assert (a - b).abs().max() <= FLOAT32 * (1 + b.abs().max())


def test_only_scored_tokens_reach_the_head_and_only_computed_tokens_the_layers():
    model = make_model()
    flat_model(model)
    prompt = list(range(1, 31))
    rows = [[*prompt, 40, 41, 42], [*prompt, 50], [*prompt, 60, 61]]
    labels = [[-100] * 30 + row[30:] for row in rows]
    inputs, batch = padded_rows(rows, labels), FlatBatch.from_rows(rows, labels)
    seen = {}
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: seen.update(layer=out.shape[1]))
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs, flat_batch=batch, fused_lm_head=True)
    assert output.log_probs.shape == (3, 32)
    assert seen["layer"] == batch.counts.computed == 30 + 3 + 2 + 3
    config = model.config
    per_token = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    head = config.hidden_size * config.vocab_size * 6  # six scored tokens
    matmuls = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    # batched products of attention and of rotary frequencies are not linear layers
    attention = sum(f for op, f in counter.get_flop_counts()["Global"].items() if str(op) == "aten.bmm")
    assert matmuls - attention == 2 * (per_token * batch.counts.computed + head)


@pytest.mark.parametrize("labels", [False, True])
def test_a_plain_call_answers_with_what_a_head_has_beside_logits(labels):
    """Values of each token, of a head that reads the token before, too."""
    model = with_values(make_model())
    head = model.value.forward
    model.value.forward = lambda hidden: head(hidden) + head(hidden.roll(1, 1)) * (torch.arange(6) > 0)[:, None]
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7]]
    inputs = padded_rows(rows, rows)
    if not labels:
        del inputs["labels"]
    expected = model(**inputs)
    install(model)
    found = model(**inputs, flat_batch=FlatBatch.from_rows(rows, rows))
    real = inputs["attention_mask"].bool()
    assert found.keys() == expected.keys() - {"cache", "past_key_values"}
    for name in ("logits", "values"):
        assert torch.allclose(found[name][real], expected[name][real], atol=FLOAT32)
        assert not found[name][~real].any()


def test_installing_again_changes_the_route_and_nothing_else():
    model = make_model()
    flat_model(model)
    before = model.forward
    for route in (choose_route(model), choose_route(model, "mask"), choose_route(model, "segment")):
        FlatModel.install(model, route)
        assert FlatModel.of(model).route == route
        assert route.loaded_with == "sdpa"
        assert model.forward == before


def test_a_copy_of_a_model_computes_with_its_own_weights_and_on_its_own_route():
    model = with_head(make_model())
    route = choose_route(model)
    FlatModel.install(model, route).edits.pending.append(
        (torch.zeros(3), torch.Generator(), print)
    )  # as events, no copies
    clone = copy.deepcopy(model)
    FlatModel.of(model).edits.pending.clear()
    rows = [[1, 2, 3, 4], [1, 2, 6]]
    as_rows, batch = padded_rows(rows, rows) | {"fused_lm_head": True}, FlatBatch.from_rows(rows, rows)
    with torch.no_grad():
        before = model(**as_rows).log_probs
        for parameter in clone.parameters():
            parameter.mul_(1.5)
        for inputs in (as_rows, {**as_rows, "flat_batch": batch}):
            assert not torch.allclose(clone(**inputs).log_probs, before)
        assert torch.allclose(clone(**inputs).log_probs, clone(**as_rows).log_probs, atol=FLOAT32)
        install(clone, backend="mask")
        assert FlatModel.of(model).route == route
        assert FlatModel.of(clone).route.backend == "mask"
        assert torch.allclose(clone(**inputs).log_probs, clone(**as_rows).log_probs, atol=FLOAT32)
        assert torch.allclose(model(**inputs).log_probs, before, atol=FLOAT32)


def test_a_backend_that_was_asked_for_is_used_or_refused_with_every_reason():
    model = make_model()
    assert choose_route(model, "mask").backend == "mask"
    with pytest.raises(ValueError, match="needs CUDA\n.*needs float16 or bfloat16"):
        choose_route(model, "varlen")
    with pytest.raises(ValueError, match="pip install flash-attn"):
        choose_route(model, "flash")
    with pytest.raises(ValueError, match="`flat_attention='fast'` is not one of"):
        choose_route(model, "fast")


@REENTRANT
def test_gradient_checkpointing_recomputes_with_the_layout_of_its_own_batch(reentrant):
    """Two batches go forward before either goes backward: no layout may be looked up in shared state."""
    model = make_model(dtype=torch.float64)
    flat_model(model)
    rows = [
        [[1, 2, 3, 4, 5], [1, 2, 3, 6]],
        [[7, 8, 9, 10], [7, 11, 12, 13, 14]],
    ]  # both 7 or 9 flat tokens, other cuts
    batches = [(padded_rows(r, r), FlatBatch.from_rows(r, r)) for r in rows]

    def gradients():
        losses = [model(**inputs, flat_batch=batch, fused_lm_head=True).log_probs.sum() for inputs, batch in batches]
        model.zero_grad()
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters()]

    model.train()
    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=FLOAT32, atol=FLOAT32)


def test_a_second_trainer_and_mixed_precision_find_the_route():
    """Trainers add their head to the same instance, accelerate wraps its forward, and models may share a config."""
    model = make_model()
    flat_model(model)
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    wrapped = model.forward
    assert choose_route(model) == FlatModel.of(model).route == Route("segment", "sdpa", prefix_sharing=True)
    install(model, backend="mask")
    assert model.forward == wrapped
    assert FlatModel.of(model).route == Route("mask", "sdpa", prefix_sharing=True)
    with_head(model)
    assert FlatModel.of(model) is None
    install(model)
    assert FlatModel.of(model).route == Route("segment", "sdpa", prefix_sharing=True)
    assert choose_route(type(model)(model.config)) == Route("segment", "sdpa", prefix_sharing=True)


def test_neftune_noise_has_the_size_of_rows():
    """Uniform noise of at most alpha / sqrt(length * hidden size): the longest of many draws is near that."""
    model = make_model()
    flat_model(model)
    seen = noise_of(model)
    rows = [[1, 2, 3, 4, 5, 6]] * 8
    inputs, flat_batch = padded_rows(rows, rows), FlatBatch.from_rows(rows, rows, prefix_sharing=False)
    model.train()
    for extra in ({}, {"flat_batch": flat_batch}):
        model(**inputs, **extra, fused_lm_head=True)
    bound = 5.0 / (6 * model.config.hidden_size) ** 0.5
    assert len(seen) == 2
    for noise in seen:
        assert 0.9 * bound < noise.abs().max() <= bound * (1 + 1e-5)
        # Uniform: as many of some hundred draws, within four deviations of their number, below each tenth of the range
        below = [(noise < bound * (tenth / 5 - 1)).double().mean().item() for tenth in range(1, 10)]
        assert below == pytest.approx([tenth / 10 for tenth in range(1, 10)], abs=2 / noise.numel() ** 0.5)
    model(**inputs, flat_batch=replace(flat_batch, packed_length=48), fused_lm_head=True)
    bound = 5.0 / (48 * model.config.hidden_size) ** 0.5  # in TRL, one row of all tokens
    assert 0.9 * bound < seen[-1].abs().max() <= bound * (1 + 1e-5)
    assert model.get_input_embeddings().neftune_noise_alpha == 5.0


def twelve_tokens():
    """A call with two rows that share nothing."""
    rows = [[1, 2, 3, 4, 5, 6]] * 2
    batch = FlatBatch.from_rows(rows, rows, prefix_sharing=False)
    return {"flat_batch": batch, "labels": torch.tensor(rows), "fused_lm_head": True}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        torch.OutOfMemoryError("no room"),
        RuntimeError("a hook of one's own"),
    ],
    ids=["cublas", "pytorch", "user"],
)
def test_errors_that_a_long_flat_row_does_not_cause_stay_as_they_are(error, monkeypatch):
    model = make_model(max_position_embeddings=8)
    flat_model(model)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(model.model.layers[0], "forward", fail)
    with pytest.raises(type(error), match=str(error)):
        model(**twelve_tokens())


def test_a_table_that_is_shorter_than_a_flat_row_is_explained():
    model = tiny_model("gpt_neo", max_position_embeddings=8)
    flat_model(model, backend="mask")
    with pytest.raises(ValueError, match="cannot compute a flat row of 12 tokens, more than the 8 positions"):
        model(**twelve_tokens())


def test_a_model_without_memory_answers_in_shapes():
    model = make_model().to("meta")
    install(model)
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    batch, rows = FlatBatch.from_padded(ids, (ids != 0).long(), ids).to("meta"), ids.to("meta")
    assert model(flat_batch=batch, input_ids=rows).logits.shape == (2, 3, model.config.vocab_size)
