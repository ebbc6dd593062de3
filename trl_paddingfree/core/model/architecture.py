"""What the public names of a model's layers and config tell: limits, RoPE types, dropout."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# Token-type rows that processors return with `input_ids`; a flat batch replaces them
TYPE_ROWS = ("token_type_ids", "mm_token_type_ids")
# Names of the cache argument, the first one since transformers 5.24
CACHES = ("cache", "past_key_values", "cache_params")


def transformers_model(model: torch.nn.Module, function: str) -> PreTrainedModel:
    """The outermost transformers model in `model`, under PEFT or other wrappers. Errors name the calling `function`."""
    if isinstance(model, str):
        raise TypeError(
            f"`model={model!r}`: `{function}` takes a model itself, not its name. Pass "
            f"`AutoModelForCausalLM.from_pretrained({model!r})`."
        )
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    base = next((each for each in modules if isinstance(each, PreTrainedModel)), None)
    if base is None:
        raise TypeError(f"`{function}` takes a model of transformers, and there is none in a {type(model).__name__}.")
    if base.config.is_encoder_decoder:
        raise ValueError(
            f"{type(base).__name__} has an encoder and a decoder, and `{function}` supports decoder-only models."
        )
    return base


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """An entry of a configuration, possibly an alias; `None` if this type of model has none."""
    return getattr(config, name, None)  # no class lists all names: there are aliases, properties and extra keys


def by_name(forward: Callable, args: Sequence[object], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `forward` by name, including positional ones."""
    return dict(zip(inspect.signature(forward).parameters, args, strict=False), **kwargs) if args else kwargs


def wants(config: PreTrainedConfig, arguments: dict[str, Any], name: str) -> bool:
    """Whether a call asks for `name`; if its arguments leave it unset, the configuration decides."""
    value = arguments.get(name)
    return bool(config_value(config, name) if value is None else value)


def classifies_rows(model: PreTrainedModel) -> bool:
    """Whether the head of `model` reads one token of each row, which transformers finds by `config.pad_token_id`."""
    return any(base.__name__.endswith("ForSequenceClassification") for base in type(model).__mro__)


def position_limits(model: PreTrainedModel) -> list[int]:
    """Maximum number of positions in a row, one entry for each name under which this configuration states it."""
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    values = [config_value(model.config.get_text_config(), name) for name in names]
    return [value for value in values if isinstance(value, int) and value > 0]  # XLNet has -1 for no limit


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that compute attention, recognized by transformers' class names."""
    return [module for module in model.modules() if "Attention" in type(module).__name__]


def attention_dropout(model: torch.nn.Module) -> float:
    """Attention dropout in training, the largest of any layer. Layers store it as a float or module, by many names."""
    layers = attention_layers(model)
    held = [(name, value) for layer in layers for name, value in vars(layer).items() if isinstance(value, float)]
    held += [(n, m.p) for layer in layers for n, m in layer.named_children() if isinstance(m, torch.nn.Dropout)]
    return max((x for name, x in held if name == "dropout" or ("drop" in name and "att" in name)), default=0.0)


def beyond_varlen(model: torch.nn.Module) -> list[str]:
    """What attention layers need that PyTorch's varlen kernel does not support, apart from dropout."""
    # Layers keep the kernel's arguments as attributes, or as parameters (sinks)
    held = [{**vars(layer), **dict(layer.named_parameters(recurse=False))} for layer in attention_layers(model)]
    sizes = {values["head_dim"] for values in held if values.get("head_dim") is not None}
    beyond = [f"a head size of {size}" for size in sorted(sizes) if size > 256 or size % 8]
    others = {"attn_logit_softcapping": "soft-capping", "sinks": "sinks"}
    return beyond + [word for name, word in others.items() if any(values.get(name) is not None for values in held)]


def rotary_limits(*configs: PreTrainedConfig) -> dict[str, int]:
    """RoPE types whose frequencies depend on the longest row of a batch, each with the length from which they do."""
    limits: dict[str, int] = {}
    for config in configs:
        parameters = config_value(config, "rope_parameters") or {}
        kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # per layer type
        for kind in kinds:  # the two below are recomputed in each forward, from the largest position
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
    """`width`, if RoPE frequencies depend on the length of rows that wide, otherwise `None`."""
    return width if any(width >= limit for limit in rotary_limits(*configs).values()) else None


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The layer stack beneath the head. `get_decoder` of ModernBERT's decoder returns its head's `decoder` instead."""
    decoder: torch.nn.Module = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model  # type: ignore[return-value]


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model's backbone has a vision tower whose features it merges."""
    return hasattr(model.base_model, "get_image_features")  # no class stands for this
