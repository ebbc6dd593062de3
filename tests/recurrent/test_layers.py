"""Layers that carry state see rows: flat and shared against padded, in every family, with kernels and without."""

import copy
import types
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model

from tests.helpers.architectures import is_older, proven, tiny_model, with_head
from tests.helpers.flat_and_padded import assert_equals_padded, assert_same_gradients, install
from tests.helpers.float64 import TOLERANCE, float64_throughout, in_float64
from tests.helpers.reference_flash import reference_flash
from tests.helpers.reference_state import reference_state_kernels
from tests.helpers.tiny import SEED, arguments, conversations, lora, preference_data
from tests.helpers.trees import random_segments
from tests.runs import compare, gradient_differences, largest_of
from trl_paddingfree import FlatBatch, Segments
from trl_paddingfree.core.check.comparison import relative_error
from trl_paddingfree.core.check.gradients import RowsInTraining
from trl_paddingfree.core.check.prove import prove
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.model.told import FlatMask
from trl_paddingfree.recurrent import layers as state_layers
from trl_paddingfree.recurrent import tree as state_tree
from trl_paddingfree.recurrent.pieces import PathRows, groups_of_like_length

SHORT = {"steps": 2, "max_length": 64}

# One of each kind of layer; what else transformers has of it is in docs/models.md
FAMILIES = {
    "gated delta net": "qwen3_5_text",
    "gated delta net, mixture": "qwen3_next",
    "kimi's delta attention": "bailing_hybrid",
    "mamba 2": "mamba2",
    "mamba 2, mixture": "nemotron_h",
    "mamba 2 beside attention": "falcon_h1",
    "mamba 2 and shared attention": "zamba2",
    "mamba": "mamba",
    "mamba, mixture": "jamba",
    "mamba and shared attention": "zamba",
    "short convolution": "lfm2_moe",
    "short convolution without a kernel": "lfm3",
    "convolutions within attention": "inkling_text",
    "distances along the axis": "inkling2_text",
    "convolution of keys": "zaya",
    "recurrence by positions": "recurrent_gemma",
    "decay": "minimax",
    "shift": "rwkv",
    "matrix memory": "xlstm",
    "compressed keys": "deepseek_v4",
}
# What these look along the sequence with is none of the functions that can be given a state
ROWS = {"zaya", "recurrent_gemma", "minimax", "rwkv", "xlstm", "deepseek_v4"}
NO_KERNELS = {"lfm3"} | ROWS
# Convolutions within attention, which sees rows, and outside of it
WITHIN_ATTENTION = {"inkling_text", "inkling2_text"}
# No kernel of the first Mamba's scan knows of boundaries
NO_BOUNDARIES = NO_KERNELS | {"mamba", "jamba", "zamba", *WITHIN_ATTENTION}
KERNELS = pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])


def make(model_type, **options):
    """A tiny model with TRL's fused head, in training mode without dropout."""
    return with_head(tiny_model(model_type, seed=SEED, **options)).train()


@pytest.mark.drawn(9)
@KERNELS
@pytest.mark.parametrize("model_type", FAMILIES.values(), ids=FAMILIES.keys())
def test_family_passes_the_check_and_equals_padded_flat_and_shared(model_type, kernels):
    if kernels and model_type in NO_KERNELS:
        pytest.skip("it has no kernels")
    model = make(model_type)
    with reference_state_kernels(model) if kernels else nullcontext():
        result = proven(model)
        assert result.prefix_sharing
        assert result.route.states == ("rows" if model_type in ROWS else "tree")
        installed = [layer.flat_state for layer in state_layers.state_layers(model)]
        assert {state.along_tree for state in installed} >= {result.route.states == "tree"}
        told = {state.takes_boundaries for state in installed}
        takes_them = model_type != "lfm2_moe" or not is_older("5.22")
        assert (True in told) == (kernels and takes_them and model_type not in NO_BOUNDARIES - WITHIN_ATTENTION)
        assert_equals_padded(model, result.route.without_sharing(), SEED)
        # Recomputation must meet the layout of its own batch: on CUDA it runs on another thread
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            assert_equals_padded(model, result.route, SEED)
        assert_equals_padded(model, replace(result.route, states="rows"), SEED)


# Layers of one forward each: delta rules with one decay per head and per channel, scans with limits of time steps and
# without, heads of their own, a convolution alone
LAYERS = ["qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h", "jamba", "zamba", "lfm2", "lfm3"]


@pytest.mark.drawn(12)
@KERNELS
@pytest.mark.parametrize("model_type", LAYERS)
@pytest.mark.parametrize("draw", [SEED, SEED + 1])
@float64_throughout()
def test_layer_along_a_random_tree_equals_itself_on_each_path(model_type, draw, kernels):
    if kernels and model_type in NO_KERNELS:
        pytest.skip("it has no kernels")
    model = in_float64(make(model_type, initializer_range=0.05))
    layout = FlatLayout.from_segments(random_segments(draw))
    segments, width = layout.segments, model.config.hidden_size
    rng = torch.Generator().manual_seed(draw)
    states, weights = torch.randn(2, 1, segments.num_tokens, width, generator=rng, dtype=torch.float64)
    layer = state_layers.state_layers(model)[0]
    names = [name for name, _ in layer.named_parameters()]

    def differentiated(compute):
        given = states.clone().requires_grad_()
        output = compute(given)
        inputs = [given, *layer.parameters()]
        found = torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True)
        named = zip(["output", "input", *names], [output.detach(), *found], strict=True)
        return {name: x for name, x in named if x is not None}

    def path_by_path(given):
        return torch.cat([layer(given[:, segments.path(i)])[:, -n:] for i, n in enumerate(segments.lengths)], 1)

    expected = differentiated(path_by_path)
    with reference_state_kernels(model) if kernels else nullcontext():
        install(model)
        assert layer.flat_state.along_tree
        assert bool(layer.flat_state.kernels) == kernels
        found = differentiated(lambda given: layer(given, attention_mask=FlatMask.carrying(layout, per_token=True)))
    off = gradient_differences(expected, found, largest_of({**expected, "output": torch.zeros(1)}))
    assert not {name: error for name, error in off.items() if error > TOLERANCE}


def test_what_is_put_on_layers_is_of_one_model_only():
    model, other = make("qwen3_5_text"), make("qwen3_5_text")
    clone = copy.deepcopy(model)
    install(model)
    after = copy.deepcopy(model)
    FlatModel.install(after, replace(choose_route(after), states="rows"))
    (layer,), (copied,) = map(state_layers.state_layers, (model, after))
    assert layer.flat_state.along_tree
    assert not copied.flat_state.along_tree
    assert layer.flat_state.forward.__self__ is layer
    assert not any("forward" in vars(layer) for one in (other, clone) for layer in state_layers.state_layers(one))
    for one in (model, after):
        assert_equals_padded(one, replace(choose_route(one), states="tree" if one is model else "rows"), SEED)


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["put back", "wrapped"])
def test_layers_whose_forward_others_put_back_get_ours_again(is_wrapped):
    """Hooks of accelerate, for one, put back the forward that they found."""
    model = make("mamba")
    before = {layer: layer.forward for layer in state_layers.state_layers(model)}
    first = proven(model)
    for layer, forward in before.items():
        layer.forward = add_hook_to_module(layer, ModelHook()).forward if is_wrapped else forward
    with mock.patch.object(state_layers, "_along_tree", side_effect=state_layers._along_tree) as computed:
        second = proven(model)
    assert first.route == second.route
    assert computed.called


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba"])
def test_layers_that_get_their_own_forward_back_at_each_change_of_mode_train(model_type):
    """As `use_kernels=True` does, where the hub has no kernel for a layer."""

    def with_own_forwards():
        given = of_trainer("dpo", model_type)
        model = given["model"]
        change = model.train

        def train(mode=True):
            if model.training != mode:
                for layer in state_layers.state_layers(model):
                    layer.forward = types.MethodType(type(layer).forward, layer)
            return change(mode)

        model.train = train
        return given

    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": preference_data(4, SEED + 1), **SHORT}
    compare("dpo", with_own_forwards, preference_data(12, SEED), "shared", **options)


def test_states_that_do_not_go_on_are_caught_and_rows_are_tried_next(monkeypatch):
    """A branch that starts from nothing, as if its prefix were not there."""
    model, by_levels = make("qwen3_5_text"), state_tree._by_levels

    def forgetful(layout, call, *args):
        return by_levels(layout, lambda *given: call(*given[:-2], None, given[-1]), *args)

    monkeypatch.setattr(state_tree, "_by_levels", forgetful)
    result, failed = prove(model, choose_route(model))
    assert [(one.route.states, one.prefix_sharing, one.failure) for one in failed] == [("tree", True, "")]
    assert (result.route.states, result.prefix_sharing) == ("rows", True)
    assert "states along the tree" in str(failed[0])
    assert "rows of like length in one call" in state_layers.describe_state_layers(model)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "qwen3_5_text"])
def test_a_wrong_decay_shows_in_the_gradients_of_the_check(monkeypatch, model_type):
    """Gradients of the parameters that make the decay stop where a state goes on."""
    model, gather = make(model_type), state_tree.Gather
    for name, parameter in model.named_parameters():
        if "A_log" in name:  # a state that lasts: what is forgotten has no gradient to lose
            parameter.data.fill_(-4.0)

    class Detached:
        @staticmethod
        def apply(states, rows):
            return gather.apply(states.detach() if len(rows.index) < 20 else states, rows)

    monkeypatch.setattr(state_tree, "Gather", Detached)
    _, failed = prove(model, choose_route(model))
    assert [one.route.states for one in failed] == ["tree"]
    assert failed[0].gradients is not None
    assert failed[0].gradients.reason


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "falcon_h1", "zaya"])
def test_family_equals_padded_with_flash_attention(model_type):
    with reference_flash():
        model = make(model_type, attn_implementation="flash_attention_2")
        route = choose_route(model)
        assert route.backend == "flash"
        assert_equals_padded(model, route, SEED)
        assert_equals_padded(model, choose_route(model, "positions"), SEED)


def test_hashed_neighbours_are_those_of_the_own_row():
    """Qwen 4's n-gram features look tokens up, so the tokens themselves have to be rows."""
    options = {"ngram_vocab_size_base": 97, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1}
    model = make("qwen4_exp_text", ple_layer_ids=[1], eos_token_id=3, **options)
    assert model.model.layers[0].ple is not None
    assert_equals_padded(model, choose_route(model, "mask"), SEED)


@pytest.mark.parametrize("targets", ["all-linear", r".*(in_proj\w*|conv1d|conv\.conv)"], ids=["linear", "convolution"])
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text"])
def test_lora_on_a_layer_learns_as_with_padding(model_type, targets):
    model = tiny_model(model_type, seed=SEED)
    # PEFT asks for a multiple of a convolution's groups
    peft_model = get_peft_model(model, lora(r=64, target_modules=targets))
    with_head(model)
    peft_model.train()
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(part in name for name in adapted for part in ("conv.in_proj", "linear_attn.in_proj"))
    convolutions = [name for name in adapted if "conv1d.lora" in name or "conv.conv.lora" in name]
    assert bool(convolutions) == (targets != "all-linear")
    for route in (choose_route(model), choose_route(model).without_sharing()):
        assert_equals_padded(model, route, SEED)
    # transformers reads the weight that the adapter wraps, with padding too
    assert all(model.get_parameter(name).grad is None for name in convolutions)


@pytest.mark.parametrize("is_patched", [False, True], ids=["plain", "patched"])
def test_calls_without_a_layout_and_copies_are_untouched(is_patched):
    model = make("lfm2").eval()
    for layer in state_layers.state_layers(model) if is_patched else ():  # as Liger does it
        layer.forward = types.MethodType(type(layer).forward, layer)
    generate = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(**generate)
    install(model)
    forwards = [layer.forward for layer in state_layers.state_layers(model)]
    install(model)
    assert [layer.forward for layer in state_layers.state_layers(model)] == forwards
    assert torch.equal(model.generate(**generate), tokens)
    (layer,) = state_layers.state_layers(model)
    assert layer.flat_state.along_tree
    clone, states = copy.deepcopy(layer), torch.randn(1, 4, model.config.hidden_size)
    with torch.no_grad():
        clone.out_proj.weight.zero_()
    assert clone(states).abs().max() == 0 < layer(states).abs().max()


@float64_throughout()
def test_padding_on_the_right_cannot_reach_a_token_or_a_gradient(monkeypatch):
    """Rows all in one group, padded, agree with rows one by one, for tokens and gradients."""
    model = in_float64(make("qwen3_5_text"))
    FlatModel.install(model, replace(choose_route(model), states="rows"))
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 10], [11]]
    batch = FlatBatch.from_rows(rows, rows)
    names, answers = [name for name, _ in model.named_parameters()], []
    for step_cost in (1e9, 0.0):
        monkeypatch.setattr(state_tree, "_STEP_COST", step_cost)
        assert len(PathRows.of(batch.layout, step_cost).shapes) == (1 if step_cost else 3)
        logits = model(flat_batch=batch).logits
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        answers.append((logits.detach(), dict(zip(names, gradients, strict=True))))
    (one_group, expected), (alone, gradients) = answers
    assert (one_group - alone).abs().max() < TOLERANCE * alone.abs().max()
    assert_same_gradients(expected, gradients)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), step_cost=st.sampled_from([0.0, 1.0, 8.0, 1e9]))
@settings(deadline=None)
def test_groups_hold_every_row_once_and_cost_no_more_than_one_group_or_one_each(lengths, step_cost):
    groups = groups_of_like_length(lengths, step_cost)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    cost = sum(max(lengths[i] for i in group) * (len(group) + step_cost) for group in groups)
    one_group, alone = max(lengths) * (len(lengths) + step_cost), sum(n * (1 + step_cost) for n in lengths)
    assert cost <= min(one_group, alone) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("lfm2", {"layer_types": ["conv", "conv"]}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "linear_attention"]}),
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 7}),
        ("bamba", {"attn_layer_indices": []}),
    ],
)
def test_a_hybrid_of_which_no_layer_has_attention_is_exact(model_type, options):
    model = make(model_type, **options)
    result = proven(model)
    assert result.prefix_sharing
    assert_equals_padded(model, result.route, SEED)


def test_convolutions_outside_of_the_layers_are_none_of_ours():
    model = tiny_model("llama")
    assert not state_layers.state_layers(model)
    model.model.sound = torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1))
    assert not state_layers.state_layers(model)


def test_what_would_be_faster_is_named():
    assert state_layers.describe_state_layers(tiny_model("llama")) == ""
    model = tiny_model("qwen3_5_text")
    said = state_layers.describe_state_layers(model)
    assert "along the tree, each token once (Qwen3_5GatedDeltaNet)" in said
    assert "pip install causal-conv1d flash-linear-attention" in said
    for model_type in ("bamba", "jamba"):
        assert state_layers.missing_kernels(tiny_model(model_type)) == ["causal-conv1d", "mamba-ssm"]
    with reference_state_kernels(model):
        FlatModel.install(model, replace(choose_route(model), states="rows"))
        assert "in one call of their kernels" in state_layers.describe_state_layers(model)


def test_the_mask_of_a_layer_with_a_state_passes_transformers_own_rules():
    """A 2-D mask of ones is dropped, and one that is kept is cut: neither must lose the layout."""
    from transformers.masking_utils import create_recurrent_attention_mask

    layout = FlatLayout.from_segments(Segments.from_lengths([3, 2]))
    mask = FlatMask.carrying(layout, per_token=True)
    assert create_recurrent_attention_mask(SimpleNamespace(), torch.zeros(1, 5, 8), mask).context.layout is layout


@pytest.mark.parametrize(("model_type", "has_chunks"), [("qwen3_5_text", True), ("kimi_linear", True), ("lfm2", False)])
def test_recurrences_in_small_chunks_differ_by_rounding_only(model_type, has_chunks):
    model = tiny_model(model_type).eval()
    row, forwards = torch.arange(5, 45)[None], [vars(module).get("forward") for module in model.modules()]
    with torch.no_grad():
        expected = model(row, use_cache=False).logits
        with state_layers.in_small_chunks(model):
            found = model(row, use_cache=False).logits
        again = model(row, use_cache=False).logits
    off = (found - expected).abs().max() / expected.abs().max()
    assert off < 1e-5
    assert (off > 0) == has_chunks
    assert torch.equal(again, expected)
    assert [vars(module).get("forward") for module in model.modules()] == forwards


def test_the_start_up_check_knows_by_how_much_smaller_chunks_round_gradients():
    """Padding at the end of a row leaves its chunks as they are. Gates amplified the rounding of others to 1e-3."""
    reference = RowsInTraining(with_head(tiny_model("qwen3_5_text")))
    with reference.in_training():
        _, in_chunks = reference.noises()
    assert 0 < relative_error(in_chunks.at_tokens, reference.alone.at_tokens) < 1e-3


def of_trainer(task, model_type):
    """Arguments of a trainer; the reference is another model: with equal rewards, rounding would decide accuracies."""
    model = tiny_model(model_type, seed=1)
    return arguments(task, adapters=False, model=model, make=lambda seed: tiny_model(model_type, seed=seed + 1))


@pytest.mark.parametrize("model_type", ["lfm2_moe", "nemotron_h", "qwen3_5_text"])
@pytest.mark.parametrize(("task", "data"), [("dpo", preference_data), ("sft", conversations)], ids=["dpo", "sft"])
def test_family_trains_like_padded_trl(model_type, task, data):
    options = {"eval_dataset": data(6, SEED + 1), "eval_strategy": "steps", "eval_steps": 2, **SHORT}
    ours = {"gradient_checkpointing": True}
    _, flat = compare(task, partial(of_trainer, task, model_type), data(12, SEED), "shared", ours=ours, **options)
    assert flat.trainer.runtime.route.states == "tree"
    assert not flat.trainer.total_counts().repeated
    assert not any("flat/repeated_by_state_layers" in entry for entry in flat.log_history)


def test_parts_and_precomputed_references_train_like_padded_trl():
    options = {"precompute_ref_log_probs": True, "ours": {"max_tokens_per_micro_batch": 60}, **SHORT}
    compare("dpo", partial(of_trainer, "dpo", "lfm2"), preference_data(12, SEED), "ours", **options)
