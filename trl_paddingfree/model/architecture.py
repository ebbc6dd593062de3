"""What models say of themselves by public names of their layers and configurations: limits, rotary kinds, dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel


def position_limits(model: PreTrainedModel) -> list[int]:
    """The most positions that a row may have, by every name that transformers has for it in this configuration."""
    config = model.config.get_text_config()
    values = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    return [value for value in values if isinstance(value, int) and value > 0]  # XLNet has -1 for no limit


def scales_by_place(module: Any, length: int) -> bool:
    """
    Whether a layer scales its queries by their place on an axis of `length` tokens, whatever their `position_ids`.

    The layers of Llama 4 without rotary positions do (`attn_temperature_tuning`): they count `torch.arange` of their
    input. Below `floor_scale` tokens the scale is 1.
    """
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    return is_tuned and length >= module.floor_scale


def scale_of_rows(module: Any, position_ids: np.ndarray) -> np.ndarray:
    """
    `(T,)` float32: what turns the scale of such a layer by the place on the flat axis into that by the place in a row.

    Args:
        module (`torch.nn.Module`):
            The layer, see [`scales_by_place`].
        position_ids (`np.ndarray` of shape `(T,)`, int64):
            Place of each flat token in its row.
    """
    places = np.stack([np.arange(len(position_ids)), position_ids]) + 1
    flat, row = np.log1p(places // module.floor_scale) * module.attn_scale + 1
    return (row / flat).astype(np.float32)


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The modules that compute attention: transformers names their classes so."""
    return [module for module in model.modules() if "Attention" in type(module).__name__]


def attention_dropout(model: torch.nn.Module) -> float:
    """
    The dropout that attention layers give to their kernel in training.

    They hold it as a number or as a module, under names of their own (`attention_dropout`, `attn_dropout`, `dropout`).
    """

    def is_of_scores(name: str) -> bool:
        return name == "dropout" or ("drop" in name and "att" in name)

    layers = attention_layers(model)
    held = [(name, value) for layer in layers for name, value in vars(layer).items() if isinstance(value, float)]
    held += [(n, m.p) for layer in layers for n, m in layer.named_children() if isinstance(m, torch.nn.Dropout)]
    return max((value for name, value in held if is_of_scores(name)), default=0.0)


def beyond_varlen(model: torch.nn.Module) -> list[str]:
    """What attention layers ask of their kernel that PyTorch's varlen kernel cannot do, beside dropout."""
    layers = attention_layers(model)
    sizes: set[Any] = {getattr(layer, "head_dim", None) for layer in layers} - {None}
    beyond = [f"a head size of {size}" for size in sorted(sizes) if size > 256 or size % 8]
    # Where these layers keep what they give to the kernel as `softcap` and `s_aux`
    for attribute, word in (("attn_logit_softcapping", "soft-capping"), ("sinks", "sinks")):
        if any(getattr(layer, attribute, None) is not None for layer in layers):
            beyond.append(word)
    return beyond


def rotary_limits(config: Any) -> dict[str, int]:
    """
    Kinds of rotary frequencies that follow the longest row of a batch, with the length from which on they do.

    transformers recomputes those of "longrope" and "dynamic" in each forward, from the largest of all positions.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one per kind of layer
    limits = {}
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            limits["longrope"] = kind["original_max_position_embeddings"]
        elif "dynamic" in str(kind.get("rope_type")):
            limits[kind["rope_type"]] = config.max_position_embeddings
    return limits


@contextmanager
def rotary_state_restored(model: torch.nn.Module) -> Iterator[None]:
    """Frequencies of kind "dynamic" are kept, with their length, until a longer row comes, or a short one."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module, _, _ in found]
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)
        for module, before in buffers:
            for name, buffer in before.items():
                setattr(module, name, buffer)


def functional_dropout(model: torch.nn.Module) -> dict[str, float]:
    """
    Dropout that is drawn by a function, by the name that modules hold it under: TRL's `disable_dropout` sets that of
    `torch.nn.Dropout` modules only.
    """
    return {
        name: value
        for module in model.modules()
        for name, value in vars(module).items()
        if not isinstance(module, torch.nn.Dropout) and isinstance(value, float) and "drop" in name and value > 0
    }
