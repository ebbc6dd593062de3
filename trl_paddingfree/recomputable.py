"""Layers that may recompute their activations: budgets choose among them, and compiled layers and slices ask."""

from collections.abc import Sequence

from torch.nn import Module
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .core.model.architecture import decoder_of


def recomputable_layers(model: PreTrainedModel, with_images: bool = False) -> list[GradientCheckpointingLayer]:
    """Layers of `model` that support gradient checkpointing, in order; `with_images`, the vision tower's come first."""
    decoder = dict.fromkeys(decoder_of(model).modules())
    tower = [module for module in model.base_model.modules() if module not in decoder] if with_images else []
    layers = [module for module in (*tower, *decoder) if isinstance(module, GradientCheckpointingLayer)]
    nested = {inner for layer in layers for inner in checkpointing_layers(layer)[1:]}
    return [layer for layer in layers if layer not in nested]


def recompute_first(layers: Sequence[GradientCheckpointingLayer], number: int) -> None:
    """
    Checkpoint the first `number` layers, and let the others keep their activations.

    The backward pass reaches the first layers last, when the activations of the others have been freed, so recomputing
    needs no extra memory. Layers nested in others (in Zamba) are recomputed with those, never on their own.
    """
    for i, layer in enumerate(layers):
        for module in checkpointing_layers(layer):
            module.gradient_checkpointing = module is layer and i < number


def checkpointing_layers(module: Module) -> list[GradientCheckpointingLayer]:
    """`module` and the modules within it that support gradient checkpointing, outer ones first."""
    return [inner for inner in module.modules() if isinstance(inner, GradientCheckpointingLayer)]
