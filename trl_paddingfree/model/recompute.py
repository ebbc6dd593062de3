"""Which layers of a model recompute their activations in the backward pass."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recomputable_layers(model: PreTrainedModel, with_images: bool = False) -> list[GradientCheckpointingLayer]:
    """
    The layers of `model` that can recompute their activations, in the order in which they are computed.

    With images, those of the vision tower come first.
    """
    decoder = [*model.get_decoder().modules()]
    known = set(map(id, decoder))
    tower = [module for module in model.base_model.modules() if id(module) not in known] if with_images else []
    found = [module for module in (*tower, *decoder) if isinstance(module, GradientCheckpointingLayer)]
    nested = {id(inner) for layer in found for inner in checkpointing_layers(layer)[1:]}
    return [layer for layer in found if id(layer) not in nested]


def recompute_first(layers: Sequence[GradientCheckpointingLayer], number: int) -> None:
    """
    Have the first `number` layers recompute their activations in the backward pass, and the others keep them.

    The backward pass comes to the first layers last: what the others kept is free by then, and recomputing costs no
    memory on top. Layers within them (in Zamba) recompute with them, and never by themselves.
    """
    for i, layer in enumerate(layers):
        for module in checkpointing_layers(layer):
            module.gradient_checkpointing = module is layer and i < number


def checkpointing_layers(module: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """`module` and those within it that can recompute their activations, outer ones first."""
    return [inner for inner in module.modules() if isinstance(inner, GradientCheckpointingLayer)]
