"""Mistakes that are put into one layer of eight: the check finds each of them, or names the layer as left out."""

from itertools import pairwise
from unittest import mock

import pytest
import torch

from tests.helpers.architectures import proven, tiny_model, with_head
from tests.helpers.folders import STATES
from tests.helpers.tiny import SEED, make_model
from trl_paddingfree.cli.report import try_backends
from trl_paddingfree.core.check import training
from trl_paddingfree.core.check.gradients import check_gradients
from trl_paddingfree.core.check.prove import UnprovenModelError, prove
from trl_paddingfree.core.model import backends
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route

KINDS = {
    "full": ("llama", {}),
    "sliding": ("mistral", {"sliding_window": 8}),
    "recurrent": ("lfm2", {"layer_types": ["conv"] * 7 + ["full_attention"]}),
}


def leak(states):
    """Every token gets a little of the one before it on the flat axis."""
    return states + 0.3 * torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)


def misplace(states):
    """Later tokens of the flat axis are taken to be further on in their rows."""
    return states + 0.02 * torch.arange(states.size(1), dtype=states.dtype)[None, :, None]


MISTAKES = {"leak": leak, "lost gradient": torch.Tensor.detach, "position": misplace}


def mutated(kind, number, mistake, trains, least=20):
    """A model of eight layers, one of which is wrong about flat rows of so many tokens, in one mode only."""
    model_type, options = KINDS[kind]
    make = tiny_model if kind == "recurrent" else make_model
    model = with_head(make(model_type, seed=SEED, num_hidden_layers=8, **options))
    layer = model.base_model.layers[number]
    forward = layer.forward

    def wrong(states, *args, **kwargs):
        output = forward(states, *args, **kwargs)
        # The check has the layers that carry state train in evaluation mode, but not those around them
        if layer.training != trains or states.size(0) > 1 or states.size(1) < least:
            return output
        return MISTAKES[mistake](output)

    layer.forward = wrong
    return model


CASES = [(trains, mistake) for trains in (False, True) for mistake in MISTAKES if trains or mistake != "lost gradient"]


@pytest.mark.drawn(18)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(("trains", "mistake"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_one_layer_is_found(kind, trains, mistake, number):
    model = mutated(kind, number, mistake, trains)
    with pytest.raises(UnprovenModelError):
        proven(model, fallback=False)


@pytest.mark.parametrize("least", [128, 500])
@pytest.mark.parametrize("mistake", ["leak", "position"])
@pytest.mark.parametrize("no_gradients", ["", "the engine computes whole backward passes only"])
def test_a_mistake_in_long_rows_is_found_in_evaluation_mode_and_where_an_engine_gives_no_gradients(
    no_gradients, mistake, least
):
    """References of adapters that are computed ahead are answers in evaluation mode, and so is `eval_loss`."""
    model = mutated("full", SEED % 8, mistake, trains=False, least=least)
    with pytest.raises(UnprovenModelError, match="The check found that .* in evaluation mode") as caught:
        prove(model, choose_route(model), fallback=False, no_gradients=no_gradients)
    assert "in training" not in str(caught.value)
    result, _ = prove(with_head(make_model()), choose_route(model), fallback=False, no_gradients=no_gradients)
    assert result.tried.length > 500
    assert len(result.not_compared) == bool(no_gradients)


def test_a_table_of_backends_has_what_fails_in_evaluation_mode_only():
    model = mutated("full", SEED % 8, "leak", trains=False, least=128)
    found = try_backends(model, lambda doing: None)
    tried = [result for results, _ in found.values() for result in results]
    assert tried
    assert not any(result.passed for result in tried)


def test_rows_that_fail_alone_in_training_are_blamed_on_no_slices():
    def fails():
        raise ValueError("no backward pass")

    model = with_head(make_model())
    FlatModel.install(model, choose_route(model)).peers = mock.Mock(failed=mock.Mock(side_effect=AssertionError))
    found = check_gradients(model, fails, prefix_sharing=False)
    assert found.failure == "a row alone raises ValueError: no backward pass"


def test_rows_that_fail_alone_in_evaluation_mode_are_no_reason_to_refuse_training():
    model = with_head(make_model())
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward

    def fails(states):
        if not mlp.training and states.size(0) > 1 and states.size(1) > 100:
            raise ValueError("too many tokens for inference")
        return forward(states)

    mlp.forward = fails
    result, _ = prove(model, choose_route(model), fallback=False)
    assert "in evaluation mode were not compared, because a row alone raises ValueError: too many" in str(result)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_one_layer_of_a_large_model_is_found_by_its_other_code(kind, number, monkeypatch):
    monkeypatch.setattr(training, "_MOST", (0,))
    model = mutated(kind, number, "leak", trains=True)
    with pytest.raises(UnprovenModelError):
        proven(model, fallback=False)


@pytest.mark.parametrize("kind", [pytest.param(x, marks=STATES) if x == "recurrent" else x for x in KINDS])
def test_without_a_mistake_the_same_models_are_exact(kind):
    assert not proven(mutated(kind, 3, "leak", trains=None), fallback=False).not_compared


def test_a_mistake_that_reaches_further_than_the_rows_is_found():
    model = with_head(make_model(seed=SEED, max_position_embeddings=8192))
    mlp = model.base_model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(torch.nn.functional.pad(states, (0, 0, 300, 0))[:, :-300] + states)
    with pytest.raises(UnprovenModelError, match="a flat row of more than 1024 tokens is wrong"):
        proven(model, fallback=False)


def one_token(states, at):
    """The flat token `at` gets a little of the one before it."""
    mixed = states.clone()
    mixed[:, at] += 0.1 * states[:, at - 1]
    return mixed


def only_where(holds, mistake):
    """A layer whose answer for flat rows is wrong where that holds, of states that may have a gradient."""

    def plant(model, monkeypatch):
        mlp = model.base_model.layers[0].mlp
        forward = mlp.forward

        def wrong(states):
            is_flat = states.size(0) == 1
            return mistake(forward(states)) if is_flat and holds(states) else forward(states)

        mlp.forward = wrong

    return plant


def wrong_positions(model, monkeypatch):
    """After the twelfth row, later positions are one too high."""

    def shift(module, args, kwargs):
        positions = kwargs.get("position_ids")
        if positions is None:  # rows alone
            return args, kwargs
        is_late = (positions == 0).cumsum(1) > 12
        return args, {**kwargs, "position_ids": torch.where(is_late & (positions > 6), positions + 1, positions)}

    model.base_model.register_forward_pre_hook(shift, with_kwargs=True)


def kept_for_a_shape(model, monkeypatch):
    """Rotary factors are kept as long as the shape stays."""
    rotary, kept = model.base_model.rotary_emb, {}
    forward = rotary.forward

    def remember(states, position_ids):
        if states.size(1) < 1000:
            return forward(states, position_ids)
        return kept.setdefault(position_ids.shape, forward(states, position_ids))

    rotary.forward = remember


def wrong_segments(is_wrong):
    """Attention whose queries are 5 % too large where that holds for the segments."""

    def plant(model, monkeypatch):
        attend = backends.ATTENTION["segment"]

        def scaled(layout, previous, module, query, *others, **kwargs):
            query = query.clone()
            for i, (first, last) in enumerate(pairwise(layout.segments.offsets)):
                if is_wrong(layout.segments, i):
                    query[:, :, first:last] *= 1.05
            return attend(layout, previous, module, query, *others, **kwargs)

        monkeypatch.setitem(backends.ATTENTION, "segment", scaled)

    return plant


def is_third_branch(segments, i):
    return segments.parents[i] >= 0 and segments.parents[: i + 1].count(segments.parents[i]) > 1


def is_one_of_equals(segments, i):
    return len(segments.lengths) > 1 and len({*segments.lengths}) == 1


def differentiated(tokens):
    return lambda states: torch.is_grad_enabled() and states.size(1) > tokens


# What random rows have to show, and a few short ones did not
SIZES = {
    "leak-with-gradients": only_where(differentiated(450), leak),
    "detached": only_where(differentiated(500), torch.Tensor.detach),
    "one-token": only_where(lambda states: states.size(1) > 600, lambda states: one_token(states, 500)),
    "odd-in-training": only_where(lambda states: torch.is_grad_enabled() and states.size(1) % 2, leak),
    "multiple-of-128": only_where(lambda states: states.size(1) % 128 == 0, leak),
    "positions-after-12-rows": wrong_positions,
    "kept-for-a-shape": kept_for_a_shape,
    "third-branch": wrong_segments(is_third_branch),
    "equal-lengths": wrong_segments(is_one_of_equals),
}


@pytest.mark.parametrize("planted", SIZES)
def test_a_mistake_that_only_shows_at_some_sizes_is_found(planted, monkeypatch):
    model = with_head(make_model(seed=SEED, max_position_embeddings=8192))
    SIZES[planted](model, monkeypatch)
    try:
        _, failed = prove(model, choose_route(model), fallback=False)
    except UnprovenModelError:
        return
    assert failed  # it only shows where prefixes are shared: the model trains without


def test_the_result_names_the_sizes_that_were_tried():
    model = with_head(make_model(seed=SEED, max_position_embeddings=8192))
    assert str(proven(model).tried) == "up to 22 rows of up to 104 tokens, 1,280 in all"
