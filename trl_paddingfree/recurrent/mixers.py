"""What the core asks of layers that carry state, see [`~trl_paddingfree.core.model.mixers.Mixers`]."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from ..core.flat.batch import Inputs
from ..core.model.backends import BackendName
from ..core.model.mixers import Mixers, Way
from ..core.model.told import NOT_ATTENTION, FlatMask, PassContext, masks_by_kind
from . import layers


class StateLayers(Mixers):
    """Recurrences and short convolutions."""

    @staticmethod
    def arguments(model: PreTrainedModel, backend: BackendName, context: PassContext) -> Inputs:
        layers.bind_again(model)
        if without_attention := layers.state_arguments(model, context):
            return without_attention
        of_states = dict.fromkeys(NOT_ATTENTION, FlatMask.carrying(context, per_token=True))
        return {"attention_mask": {**of_states, **masks_by_kind(model, backend, context)}}

    def found(self, model: PreTrainedModel) -> bool:
        return bool(layers.state_layers(model))

    def way(self, model: PreTrainedModel) -> Way:
        return "tree" if any(map(layers.can_go_along_tree, layers.state_layers(model))) else "rows"

    def install(self, model: PreTrainedModel, way: Way) -> bool:
        layers.install_state_layers(model, along_tree=way == "tree")
        return layers.repeats_prefixes(model)

    def trains(self, module: torch.nn.Module) -> bool:
        return layers.is_state_layer(module)

    def rounding(self, model: PreTrainedModel) -> Sequence[AbstractContextManager[None]]:
        return [layers.in_small_chunks(model)] if self.found(model) else []

    def pads(self, model: PreTrainedModel, way: Way) -> bool:
        return way == "tree" or not self.found(model)

    def heads(self, model: PreTrainedModel) -> tuple[list[str], int | None]:
        found = layers.state_layers(model)
        whole = {type(layer).__name__ for layer in found if not layers.can_go_along_tree(layer)}
        return sorted(whole), layers.state_heads(model)

    def describe(self, model: PreTrainedModel) -> str:
        return layers.describe_state_layers(model)
