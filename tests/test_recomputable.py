"""Which layers recompute."""

from transformers.modeling_layers import GradientCheckpointingLayer

from tests.helpers.architectures import tiny_model
from trl_paddingfree.recomputable import recomputable_layers, recompute_first


def test_layers_within_layers_recompute_with_them():
    model = tiny_model("zamba2")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    layers = recomputable_layers(model)
    flags = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    assert len(flags) > len(layers)
    recompute_first(layers, 1)
    assert [name for name, module in flags.items() if module.gradient_checkpointing] == ["model.layers.0"]
