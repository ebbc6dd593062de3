"""A flat batch in slices, one after another, against the same batch whole: log-probabilities and all gradients."""

import gc
import weakref
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.core.check.test_architectures import MUST_WORK
from tests.helpers.architectures import MODEL_TYPES, tiny_model, with_head
from tests.helpers.flat_and_padded import (
    assert_same_gradients,
    gradients_of,
    install,
    log_probs_and_gradients,
    noise_of,
    tree,
)
from tests.helpers.float64 import TOLERANCE, float64_throughout, in_float64
from tests.helpers.pages import ROOT
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import (
    ATTENTIONS,
    FOLLOWING,
    REENTRANT,
    SEED,
    SHARING,
    following_rotary,
    make_model,
    reward_model,
)
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.core.flat.schedule import Schedule
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.peers import Alone
from trl_paddingfree.slices import decoder as slices
from trl_paddingfree.slices.axis import kept_keys
from trl_paddingfree.slices.passes import scheduled, why_whole
from trl_paddingfree.spans import NO_WINDOW, cut_by_number

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
# By the page of models: those that go flat and read keys by our attention
VERDICTS = {cells[1].strip(" `"): cells[2].strip() for row in PAGE if len(cells := row.split("|")) > 7}
FLAT = [name for name in MODEL_TYPES if VERDICTS.get(name) == "flat and shared"]


def flat_model(model, **route):
    """What makes a model compute flat batches, in training mode."""
    return install(with_head(model.train(), outputs=("log_probs", "entropy")), **route)


def padded(rows, value):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def cuts_of(total, seed=SEED):
    """Cuts anywhere, in slices of two tokens, the fewest that there are, and in more slices than tokens."""
    rng, first = torch.Generator().manual_seed(seed), 2 + seed % 2
    drawn = (first + 2 * torch.randint((total - first) // 2, (5,), generator=rng)).sort().values.tolist()
    return [(0, *drawn, total), (0, 2, 4, total), (*range(0, total - 1, 2), total), cut_by_number(total, total + 3)]


def computed(flat, batch, cuts=(), kept_slices=1, **given):
    """Log-probabilities and gradients of a batch, cut at these positions or whole, with dropout from one state."""
    batch = scheduled(batch, Schedule(cuts, kept_slices=kept_slices))
    torch.manual_seed(SEED)
    return log_probs_and_gradients(flat.model, labels=padded(batch.to_rows(), -100), flat_batch=batch, **given)


@float64_throughout()
def assert_equals_whole(flat, batch, some=None, **given):
    """Cut anywhere, and where it comes to that, the same as whole, in float64."""
    in_float64(flat.model)
    expected, gradients = computed(flat, batch, **given)
    for cuts in some or cuts_of(batch.layout.segments.num_tokens):
        actual, found = computed(flat, batch, cuts, 1 + len(cuts) % 3, **given)
        assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCE, cuts
        assert_same_gradients(gradients, found)


@float64_throughout()
def assert_answer_equals_whole(model, batch, answer):
    """What `answer` gives of a batch cut anywhere, and gradients of its squares, as of the whole, in float64."""
    in_float64(model)
    found = []
    for cuts in ((), *cuts_of(batch.layout.segments.num_tokens)):
        model.zero_grad()
        values = answer(scheduled(batch, Schedule(cuts)))
        values.square().sum().backward()
        found.append((values, gradients_of(model)))
    (expected, expected_gradients), *others = found
    for values, gradients in others:
        torch.testing.assert_close(values, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert_same_gradients(expected_gradients, gradients)


def batch_of(rows=None, prefix_sharing=True):
    rows = tree(SEED) if rows is None else rows
    return FlatBatch.from_rows(rows, rows, prefix_sharing=prefix_sharing)


# --- Architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.drawn(16)
@pytest.mark.parametrize("name", FLAT)
def test_every_flat_model_in_slices_equals_itself_whole_or_is_refused_by_name(name):
    flat = flat_model(tiny_model(name, seed=SEED))
    if reason := why_whole(flat):
        assert "compute each row by itself" in reason or "which takes no keys of earlier slices" in reason
        return
    if name == "phimoe":  # it draws its experts at random in training
        flat.model.eval()
    assert_equals_whole(flat, batch_of(), cuts_of(batch_of().layout.segments.num_tokens)[:2])


# Windows, soft-caps, sinks, latent keys, chunks with scaled queries, keys of earlier layers, tied embeddings, experts
FOUR = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
KV_SHARED = {"gemma3n": ("gemma3n_text", FOUR), "gemma4": ("gemma4_text", FOUR)}
TIED = {"tied": ("llama", {"tie_word_embeddings": True})}
KINDS = ["mistral", "gemma2", "llama4_text", "gpt2", *KV_SHARED, *TIED, "gpt_oss", "deepseek_v3", "mixtral"]


@pytest.mark.drawn(8)
@SHARING
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_attention_cut_anywhere(name, prefix_sharing):
    model_type, options = {**MUST_WORK, **KV_SHARED, **TIED}.get(name, (name, {}))
    flat = flat_model(tiny_model(model_type, seed=SEED, **options))
    assert_equals_whole(flat, batch_of(prefix_sharing=prefix_sharing))
    assert_equals_whole(flat, batch_of([tree(SEED)[0]]))


# Layers of one kernel each that hand a state on, beside attention and alone, once in a model and several times
STATES = ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "mamba", "jamba", "zamba"]
STATES += ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"]


@pytest.mark.drawn(8)
@SHARING
@pytest.mark.parametrize("name", STATES)
def test_layers_with_a_state_cut_anywhere(name, prefix_sharing):
    flat = flat_model(tiny_model(name, seed=SEED))
    assert why_whole(flat) == ""
    for batch in (batch_of(prefix_sharing=prefix_sharing), batch_of([tree(SEED)[0]])):
        assert_equals_whole(flat, batch)


@pytest.mark.parametrize("name", ["llama2", "mistral", "olmo3", "deepseek_v3"])
def test_flash_attention_is_told_of_keys_of_earlier_slices(name):
    """One row is a path without a branch: nothing is gathered, and keys are more than queries all the same."""
    model_type, options = MUST_WORK[name]
    with reference_flash():
        flat = flat_model(tiny_model(model_type, attn_implementation="flash_attention_2", seed=SEED, **options))
        assert flat.route.backend == "flash"
        for rows in (tree(SEED), tree(SEED)[:1]):
            assert_equals_whole(flat, batch_of(rows))


@ATTENTIONS
@FOLLOWING
@pytest.mark.parametrize("limit", [10, 64], ids=["reached", "not reached"])
def test_frequencies_follow_the_longest_row_in_every_slice(kind, limit, attention):
    flat = flat_model(make_model(vocab_size=96, **following_rotary(limit, kind), attn_implementation=attention))
    rows = tree(SEED)
    batch = FlatBatch.from_rows(rows, rows, reach=max(map(len, rows)) if limit == 10 else None)
    assert_equals_whole(flat, batch)


def test_the_mask_backend_and_layers_with_a_state_of_rows_cannot():
    flat = flat_model(make_model(vocab_size=96), backend="mask")
    assert "takes no keys of earlier slices" in why_whole(flat)
    flat = flat_model(tiny_model("opt", layerdrop=0.5))
    assert "leaves out layers at random" in why_whole(flat)
    flat = flat_model(tiny_model("lfm2"))
    flat.peers = SimpleNamespace(name="`sequence_parallel_size=2`")
    assert "`sequence_parallel_size=2`" in why_whole(flat)
    flat.peers = Alone()
    flat = FlatModel.install(flat.model, replace(flat.route, states="rows"))
    assert "compute each row by itself" in why_whole(flat)
    flat = flat_model(tiny_model("inkling_text"))  # of its convolutions, those within attention see rows
    assert (flat.route.states, flat.repeats) == ("tree", True)
    assert "compute each row by itself" in why_whole(flat)


# --- What is around slices -------------------------------------------------------------------------------------------


@REENTRANT
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_checkpointing_that_others_left_on_recomputes_no_layer_within_a_slice(name, reentrant):
    flat = flat_model(tiny_model(name, seed=SEED))
    flat.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equals_whole(flat, batch_of())
    layers = [layer for layer in flat.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    assert all(layer.gradient_checkpointing for layer in layers)
    total = batch_of().layout.segments.num_tokens
    calls = []
    with layers[0].register_forward_pre_hook(lambda *_: calls.append(1)):
        computed(flat, batch_of(), (0, 9, 20, total))
    assert len(calls) == 3 + 2  # the last slice is not computed again


@pytest.mark.parametrize("kind", ["router", "entropy"])
def test_outputs_beside_log_probabilities_are_those_of_all_slices(kind):
    flat = flat_model(tiny_model("mixtral", seed=SEED, router_aux_loss_coef=0.3))
    given, batch = {"output_router_logits": kind == "router"}, batch_of()
    given |= {"labels": padded(batch.to_rows(), -100), "fused_lm_head": True, "use_cache": False}
    field = "aux_loss" if kind == "router" else "entropy"
    assert_answer_equals_whole(flat.model, batch, lambda sliced: flat.model(flat_batch=sliced, **given)[field])


def test_noise_of_embeddings_has_the_size_of_rows_and_is_drawn_once():
    """Uniform noise of at most alpha / sqrt(length * hidden size); what is computed again has the noise it had."""
    flat, row = flat_model(make_model(vocab_size=96)), [1, 2, 3, 4, 5, 6]
    seen = noise_of(flat.model)
    computed(flat, batch_of([row] * 8, prefix_sharing=False), (0, 15, 32, 48))
    bound = 5.0 / (6 * flat.model.config.hidden_size) ** 0.5
    assert [noise.size(1) for noise in seen] == [15, 17, 16, 17, 15]
    for noise in seen:
        assert 0.8 * bound < noise.abs().max() <= bound * (1 + 1e-5)
    assert torch.equal(seen[0], seen[4])
    assert torch.equal(seen[1], seen[3])
    assert flat.model.get_input_embeddings().neftune_noise_alpha == 5.0


def test_dropout_is_recomputed_as_it_was_drawn(monkeypatch):
    """Slices that keep all of their activations, in place of computing them again, have the same gradients."""
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    flat = flat_model(make_model(vocab_size=96))
    get_peft_model(flat.model, adapters)
    torch.manual_seed(SEED)
    for name, p in flat.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    flat.model.train()
    runs = []
    for compute in (checkpoint, lambda function, *args, use_reentrant: function(*args)):
        monkeypatch.setattr(slices, "checkpoint", compute)
        runs.append(computed(flat, batch_of(), (0, 9, 20, batch_of().layout.segments.num_tokens)))
    (one, gradients), (other, expected) = runs
    assert torch.equal(one, other)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_slices_hold_the_keys_that_they_read_and_nothing_waits_for_the_garbage_collector(monkeypatch, request):
    """Rows that share nothing: no slice reads what another has kept, unless a row is cut."""
    flat, held, passes, attend = flat_model(make_model(vocab_size=96)), [], [], slices.Carry.attend

    def watch(carry, *args, **kwargs):
        held.append(sum(map(len, carry.earlier)))
        passes.append(weakref.ref(carry))
        return attend(carry, *args, **kwargs)

    monkeypatch.setattr(slices.Carry, "attend", watch)
    batch, layers = batch_of([[*range(1, 9)]] * 4, prefix_sharing=False), flat.model.config.num_hidden_layers
    cut = [0] * layers + [2 * layers] * 3 * layers
    request.addfinalizer(gc.enable)
    gc.disable()
    for is_training in (False, True):
        for cuts, expected in (((0, 8, 16, 24, 32), [0] * 4 * layers), ((0, 12, 20, 28, 32), cut)):
            held.clear()
            with torch.set_grad_enabled(is_training):
                sliced = scheduled(batch, Schedule(cuts))
                flat.model(flat_batch=sliced, labels=padded(batch.to_rows(), -100), fused_lm_head=True)
            assert held == expected
            assert not any(carry() for carry in passes)


@pytest.mark.parametrize("window", [2, 6, 40])
def test_layers_with_a_window_keep_the_keys_that_later_slices_see(monkeypatch, window):
    """As many bytes as the plan counts for them."""
    flat, kept, attend = flat_model(tiny_model("gemma2", seed=SEED, sliding_window=window)), [], slices.Carry.attend

    def watch(carry, *args, **kwargs):
        output, place = attend(carry, *args, **kwargs), carry.places[args[2]][-1]
        kept.append((carry.number, kwargs["sliding_window"], carry.kept[place : place + 2]))
        return output

    monkeypatch.setattr(slices.Carry, "attend", watch)
    rows, cuts = [[*range(1, 31)], [*range(1, 26), 40]], (0, 10, 20, 32)
    batch = scheduled(batch_of(rows), Schedule(cuts))
    with torch.no_grad():
        flat.model(flat_batch=batch, labels=padded(rows, -100), fused_lm_head=True)
    sizes = {(number, seen): keys.size(2) for number, seen, (keys, _) in kept}
    # The second row goes on from token 24, in the last slice too
    seen = min(window - 1, 10)
    assert sizes == {(0, None): 10, (1, None): 10, (2, None): 0, (0, window): seen, (1, window): seen, (2, window): 0}
    monkeypatch.undo()
    needs = count_kept_bytes(flat.model, flat.route)
    assert needs.windows.tolist() == [window, NO_WINDOW]
    total, _ = kept_keys(batch.layout.segments, cuts, needs.windows)
    assert needs.of_keys.sum(0) @ total == sum(x.nbytes for _, _, both in kept for x in both)


def test_a_row_that_is_scored_nowhere_and_a_slice_that_scores_nothing():
    flat, rows = flat_model(make_model(vocab_size=96)), tree(SEED)
    labels = [[-100] * len(row) for row in rows]
    labels[1][-3:] = rows[1][-3:]
    given = {"labels": padded(labels, -100), "fused_lm_head": True}
    batch = FlatBatch.from_rows(rows, labels)
    assert_answer_equals_whole(flat.model, batch, lambda sliced: flat.model(flat_batch=sliced, **given).log_probs)


def test_hidden_states_of_slices_are_those_of_the_whole():
    flat, batch = flat_model(make_model(vocab_size=96)), batch_of()
    answer = lambda sliced: flat.hidden_states(sliced, batch.row_mask[:, 1:])  # noqa: E731
    assert_answer_equals_whole(flat.model, batch, answer)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "opt", "mixtral"])
def test_a_pooled_head_reads_rows_of_all_slices(model_type):
    model, batch = reward_model(model_type, vocab_size=96).eval(), batch_of()
    install(model)
    inputs = {"input_ids": padded(batch.to_rows(), 0), "attention_mask": batch.row_mask.long()}
    answer = lambda sliced: model(flat_batch=sliced, **inputs).logits  # noqa: E731
    assert_answer_equals_whole(model, batch, answer)


def test_a_decoder_gets_arguments_that_it_has(monkeypatch):
    """Heads that hand `input_ids` on by its place: what takes the decoder's place has its signature."""
    model, batch, seen = reward_model("gpt2", vocab_size=96).eval(), batch_of(), set()
    install(model)
    forward = model.transformer.forward
    batch = scheduled(batch, Schedule((0, 9, batch.layout.segments.num_tokens)))
    monkeypatch.setattr(
        model.transformer, "forward", wraps(forward)(lambda **given: seen.update(given) or forward(**given))
    )
    model(input_ids=padded(batch.to_rows(), 0), attention_mask=batch.row_mask.long(), flat_batch=batch)
    assert seen <= set(signature(forward).parameters)
