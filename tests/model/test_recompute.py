"""What is counted as kept for the backward pass."""

import torch

from tests.helpers.tiny import make_model
from trl_paddingfree.model.recompute import recomputable_layers
from trl_paddingfree.model.saved_bytes import SavedBytes


def test_only_what_the_backward_pass_still_needs_is_counted():
    model = make_model()
    layers = recomputable_layers(model)
    counter, tokens = SavedBytes(model, layers), torch.arange(12)[None]

    def counted():
        return sum(counter.total(layer) for layer in range(-1, len(layers)))

    with counter.counting():
        with torch.no_grad():  # a reference model's pass, whose memory is free again
            model(tokens, use_cache=False)
        assert counted() == 0
        output = model(tokens, use_cache=False)
        once = counted()
        assert once > 0
        again = model(tokens, use_cache=False)
        assert counted() > 1.9 * once
        del again
        assert counted() < 1.1 * once  # what layers were given stays
        del output
    assert counted() < 0.1 * once
