"""Models by public names of their layers and configurations: limits, rotary kinds, dropout, layers that recompute."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Rows of token types that a processor gives with `input_ids`: a flat batch replaces them
TYPE_ROWS = ("token_type_ids", "mm_token_type_ids")
# Arguments for a cache: by the first name since transformers 5.24
CACHES = ("cache", "past_key_values", "cache_params")


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """An entry of a configuration; `None` if its kind of model has none. It may stand there under another name."""
    return getattr(config, name, None)  # no class lists all names: `attribute_map`, properties, and what a file adds


def by_name(forward: Callable, args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `forward` by name, those that are given by their place, too."""
    return dict(zip(inspect.signature(forward).parameters, args, strict=False), **kwargs)


def wants(config: PreTrainedConfig, arguments: dict[str, Any], name: str) -> bool:
    """Whether the arguments of a call ask for `name`, or, where they leave it open, the configuration does."""
    value = arguments.get(name)
    return bool(config_value(config, name) if value is None else value)


def position_limits(model: PreTrainedModel) -> list[int]:
    """The most positions that a row may have, by every name that transformers has for it in this configuration."""
    values = [config_value(model.config.get_text_config(), name) for name in ("max_position_embeddings", "max_seq_len")]
    return [value for value in values if isinstance(value, int) and value > 0]  # XLNet has -1 for no limit


def counts_positions_by_mask(model: PreTrainedModel) -> bool:
    """Whether rows without `position_ids` are counted from their first token, as OPT does it, and not by columns."""
    return any(
        "attention_mask" in inspect.signature(module.forward).parameters
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    )


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that compute attention: transformers names their classes so."""
    return [module for module in model.modules() if "Attention" in type(module).__name__]


def attention_dropout(model: torch.nn.Module) -> float:
    """The dropout of attention probabilities in training: layers hold it as a number or a module, by many names."""
    layers = attention_layers(model)
    held = [(name, value) for layer in layers for name, value in vars(layer).items() if isinstance(value, float)]
    held += [(n, m.p) for layer in layers for n, m in layer.named_children() if isinstance(m, torch.nn.Dropout)]
    return max((x for name, x in held if name == "dropout" or ("drop" in name and "att" in name)), default=0.0)


def beyond_varlen(model: torch.nn.Module) -> list[str]:
    """What attention layers ask of their kernel that PyTorch's varlen kernel cannot do, except for dropout."""
    # Layers keep what they give to the kernel as attributes, and as parameters (sinks)
    held = [{**vars(layer), **dict(layer.named_parameters(recurse=False))} for layer in attention_layers(model)]
    sizes = {values["head_dim"] for values in held if values.get("head_dim") is not None}
    beyond = [f"a head size of {size}" for size in sorted(sizes) if size > 256 or size % 8]
    others = {"attn_logit_softcapping": "soft-capping", "sinks": "sinks"}
    return beyond + [word for name, word in others.items() if any(values.get(name) is not None for values in held)]


def rotary_limits(*configs: PreTrainedConfig) -> dict[str, int]:
    """Kinds of rotary frequencies that follow the longest row of a batch, with the least length from which they do."""
    limits: dict[str, int] = {}
    for config in configs:
        parameters = config_value(config, "rope_parameters") or {}
        kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # of kinds of layers
        for kind in kinds:  # of these, transformers makes the frequencies in each forward, from the largest position
            name = str(kind.get("rope_type"))
            if name == "longrope":
                length = kind["original_max_position_embeddings"]
            elif "dynamic" in name:
                length = config.max_position_embeddings
            else:
                continue
            limits[name] = min(length, limits.get(name, length))
    return limits


def rotary_reach(width: int, *configs: PreTrainedConfig) -> int | None:
    """The row length that rotary frequencies depend on, if rows are `width` tokens wide; `None` if on none."""
    return width if any(width >= limit for limit in rotary_limits(*configs).values()) else None


def functional_dropout(model: torch.nn.Module) -> dict[str, float]:
    """Dropout drawn by a function, by the name that modules hold it under: TRL's `disable_dropout` leaves it on."""
    return {
        name: value
        for module in model.modules()
        for name, value in vars(module).items()
        if not isinstance(module, torch.nn.Dropout) and isinstance(value, float) and "drop" in name and value > 0
    }


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The stack of layers beneath the head. `get_decoder` of ModernBERT's decoder gives the `decoder` of its head."""
    decoder: torch.nn.Module = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model  # type: ignore[return-value]


def recomputable_layers(model: PreTrainedModel, with_images: bool = False) -> list[GradientCheckpointingLayer]:
    """Layers of `model` that can recompute their activations, in their order: with images, the vision tower's first."""
    decoder = dict.fromkeys(decoder_of(model).modules())
    tower = [module for module in model.base_model.modules() if module not in decoder] if with_images else []
    layers = [module for module in (*tower, *decoder) if isinstance(module, GradientCheckpointingLayer)]
    nested = {inner for layer in layers for inner in checkpointing_layers(layer)[1:]}
    return [layer for layer in layers if layer not in nested]


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


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model's backbone has a vision tower whose features it merges."""
    return hasattr(model.base_model, "get_image_features")  # no class stands for this
