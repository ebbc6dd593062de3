"""What is counted as kept for the backward pass, and which layers recompute."""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model
from trl_paddingfree.model.recompute import recomputable_layers, recompute_first
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


def test_layers_within_layers_recompute_with_them():
    model = tiny_model("zamba2")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    layers = recomputable_layers(model)
    flags = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    assert len(flags) > len(layers)
    recompute_first(layers, 1)
    assert [name for name, module in flags.items() if module.gradient_checkpointing] == ["model.layers.0"]
