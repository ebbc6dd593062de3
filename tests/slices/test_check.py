"""The check of slices: what is wrong in slices only is found, and nothing else is."""

import pytest
import torch
from peft import get_peft_model

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import flat_model, install
from tests.helpers.tiny import DTYPES, SEED, lora, make_model, reward_model
from trl_paddingfree.core.check.again import check_again
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.slices import decoder as slices
from trl_paddingfree.slices.check import IN_SLICES


def made_flat(model):
    return (install if hasattr(model, "score") else flat_model)(model).model


# What attention in a slice could be given in place of the keys and values of earlier slices
WRONG_KEYS = {
    "detached": lambda pairs: [tuple(x.detach() for x in each) for each in pairs],
    "shifted": lambda pairs: [tuple(x.roll(1, 2) for x in each) for each in pairs],
    "of another layer": lambda pairs: [(*each[2:], *each[:2]) for each in pairs],
}


@DTYPES
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("wrong", WRONG_KEYS)
def test_wrong_keys_are_found_and_right_ones_pass(model_type, dtype, wrong, monkeypatch):
    model = made_flat(make_model(model_type, dtype=dtype))
    found = check_again(model, variation=IN_SLICES, draw=SEED)
    assert found.passed, found
    attend = slices.Carry.attend

    def attend_wrongly(keys, *args, **kwargs):
        right = keys.earlier
        keys.earlier = WRONG_KEYS[wrong](right)
        try:
            return attend(keys, *args, **kwargs)
        finally:
            keys.earlier = right

    monkeypatch.setattr(slices.Carry, "attend", attend_wrongly)
    found = check_again(model, variation=IN_SLICES, draw=SEED)
    assert not found.passed, found
    if dtype == torch.float32:  # answers that detached keys give are right, and bfloat16 rounds more than others move
        assert check_again(model, variation=IN_SLICES, skipped="it does not train", draw=SEED).passed == (
            wrong == "detached"
        )


@pytest.mark.parametrize(
    ("model_type", "read"), [("lfm2", "with_context"), ("mamba2", "with_context"), ("mamba2", "scan")]
)
@pytest.mark.parametrize("wrong", ["dropped", "detached"])
def test_states_that_do_not_go_on_are_found(model_type, read, wrong, monkeypatch):
    """The last tokens of earlier slices, which a convolution reads, and the states in which scans end."""
    model = made_flat(tiny_model(model_type, seed=SEED))
    found = check_again(model, variation=IN_SLICES, draw=SEED)
    assert found.passed, found
    of_kind, states_before = getattr(slices.Carry, read), slices.Carry._read

    def read_wrongly(states, *args):
        change = torch.zeros_like if wrong == "dropped" else torch.Tensor.detach
        return [change(x) for x in states_before(states, *args)]

    def wrongly(*args):
        with monkeypatch.context() as within:
            within.setattr(slices.Carry, "_read", read_wrongly)
            return of_kind(*args)

    monkeypatch.setattr(slices.Carry, read, wrongly)
    found = check_again(model, variation=IN_SLICES, draw=SEED)
    assert not found.passed, found


def test_gradients_in_other_tokens_are_found_however_small_they_are(monkeypatch):
    model = made_flat(make_model())
    attend = slices.Carry.attend

    def leaky(keys, *args, **kwargs):
        output, weights = attend(keys, *args, **kwargs)
        return output + 1e-12 * sum(x.mean() for each in keys.earlier for x in each), weights

    monkeypatch.setattr(slices.Carry, "attend", leaky)
    found = check_again(model, variation=IN_SLICES, draw=SEED)
    assert not found.passed
    assert "gets gradient from row" in str(found)


def test_adapters_of_bfloat16_round_more_than_the_rest_of_a_model():
    """TRL makes adapters of quantized models bfloat16, whose weights may be multiplied in float32."""
    model = get_peft_model(make_model(seed=SEED), lora()).get_base_model()
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16 if weight.requires_grad else torch.float32)
    results = [check_again(made_flat(model), variation=IN_SLICES, draw=SEED + draw) for draw in range(8)]
    assert all(result.passed for result in results), [*map(str, results)]


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "gemma3_text"])
def test_slices_of_a_float64_model_round_as_float32_where_it_computes_so(model_type):
    options = {"experts_implementation": "eager"} if model_type == "qwen3_next" else {}
    model = made_flat(tiny_model(model_type, dtype=torch.float64, seed=SEED, **options))
    for draw in range(3):
        found = check_again(model, variation=IN_SLICES, draw=SEED + draw)
        assert found.passed, found


def test_draws_have_rows_of_their_own_and_repeat():
    model = made_flat(make_model())
    first, second, again = (check_again(model, variation=IN_SLICES, draw=draw) for draw in (SEED, SEED + 1, SEED))
    assert first == again
    assert first.error != second.error


@pytest.mark.parametrize("make", [make_model, reward_model])
def test_the_check_leaves_a_model_and_what_is_drawn_as_they_were(make):
    model = made_flat(make())
    is_training = model.training
    flat = FlatModel.of(model)
    before, state = {**vars(flat)}, torch.get_rng_state()
    assert check_again(model, variation=IN_SLICES, draw=SEED).passed
    assert before.keys() == vars(flat).keys()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert model.training == is_training


def test_slices_that_keep_something_of_earlier_calls_do_not_count_as_random(monkeypatch):
    joined, calls = slices._joined, []

    def growing(sizes, outputs):
        calls.append(1)
        outputs[0].last_hidden_state = outputs[0].last_hidden_state * (1 + 0.1 * len(calls))
        return joined(sizes, outputs)

    monkeypatch.setattr(slices, "_joined", growing)
    assert not check_again(made_flat(make_model()), variation=IN_SLICES, draw=SEED).passed
