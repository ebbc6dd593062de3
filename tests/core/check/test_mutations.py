"""Mistakes that are put into one layer of eight: the check finds each of them, or names the layer as left out."""

import pytest
import torch

from tests.helpers.architectures import proven, tiny_model, with_head
from tests.helpers.tiny import SEED, make_model
from trl_paddingfree.core.check import training
from trl_paddingfree.core.check.prove import UnprovenModelError

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


def mutated(kind, number, mistake, trains):
    """A model of eight layers, one of which is wrong about flat rows, in one mode only."""
    model_type, options = KINDS[kind]
    make = tiny_model if kind == "recurrent" else make_model
    model = with_head(make(model_type, seed=SEED, num_hidden_layers=8, **options))
    layer = model.base_model.layers[number]
    forward = layer.forward

    def wrong(states, *args, **kwargs):
        output = forward(states, *args, **kwargs)
        # The check has the layers that carry state train in evaluation mode, but not those around them
        if layer.training != trains or states.size(0) > 1 or states.size(1) < 20:
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


@pytest.mark.drawn(6)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_one_layer_of_a_large_model_is_found_by_its_other_code(kind, number, monkeypatch):
    monkeypatch.setattr(training, "_MOST", (0,))
    model = mutated(kind, number, "leak", trains=True)
    with pytest.raises(UnprovenModelError):
        proven(model, fallback=False)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mistake_the_same_models_are_exact(kind):
    assert not proven(mutated(kind, 3, "leak", trains=None), fallback=False).not_compared


def test_a_mistake_that_reaches_further_than_the_rows_is_found():
    model = with_head(make_model(seed=SEED, max_position_embeddings=8192))
    mlp = model.base_model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(torch.nn.functional.pad(states, (0, 0, 300, 0))[:, :-300] + states)
    with pytest.raises(UnprovenModelError, match="a flat row of more than 1024 tokens is wrong"):
        proven(model, fallback=False)
