"""What keeps a model from computing flat batches, in words that its user understands."""

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..model.state_layers import carries_state


def obstacles(model: PreTrainedModel, failures: Sequence[str]) -> list[str]:
    """
    Name what stands between `model` and flat batches. The start-up check is what decides; this says why.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A causal language model that the check refused.
        failures (`Sequence[str]`):
            What the model raised on each way that was tried; empty where it answered.
    """
    config, backbone = model.config.get_text_config(), model.base_model
    reasons = []
    is_stateful = model._is_stateful or "linear_attention" in (getattr(config, "layer_types", None) or ())
    if is_stateful and not carries_state(model):
        reasons.append("It carries state from token to token, in layers that are not known here.")
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        reasons.append("It takes no `position_ids`: it counts positions along the whole flat row.")
    if offset := _first_position(model):
        reasons.append(f"It counts positions from {offset} rather than from 0.")
    if getattr(config, "is_decoder", True) is False:
        reasons.append("`config.is_decoder=False`: its tokens see those that follow.")
    if failures and all(failures):
        reasons.append("It makes its masks from a 2-D one, and takes no 4-D mask.")
    return reasons or ["Something in it does not ask where the sequences of a flat row begin."]


def _first_position(model: PreTrainedModel) -> int:
    """The position of a row's first token: RoBERTa and its kind leave room for the padding token's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and module.padding_idx:
            return module.padding_idx + 1
    return 0
