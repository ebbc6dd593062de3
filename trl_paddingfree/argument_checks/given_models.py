"""What can be said of the models among a trainer's arguments before any of them is loaded or computes anything."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.trainers.configs import Arguments
from ..hub import refuse_unreachable, why_unreadable

# Arguments that are models, with the options that say how one is loaded if only its name is given
_LOADED_BY = {
    "model": "model_init_kwargs",
    "ref_model": "model_init_kwargs",
    "teacher_model": "teacher_model_init_kwargs",
}
# Ways to load a model from somewhere else than its folder or the cache
_ELSEWHERE = {"cache_dir", "subfolder", "gguf_file", "config", "state_dict"}
# Engines that give a model its weights later
_ENGINES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def refuse_unusable(arguments: Arguments, trains: str = "") -> None:
    """
    Refuse models that are not transformers', without weights, in damaged files or that are nowhere. With `trains`, the
    name of a trainer of language models, also those with an encoder, or without a head for text.
    """
    for name, option in _LOADED_BY.items():
        value = arguments.get(name)
        if isinstance(value, torch.nn.Module):
            inner = value.get_base_model() if isinstance(value, PeftModel) else value
            if not any(isinstance(each, PreTrainedModel) for each in inner.modules()):
                raise TypeError(
                    f"`{name}` is a {type(inner).__name__}, and no model of transformers: pass one, or its name or "
                    "folder."
                )
            _refuse_weightless(value, name)
            if trains and isinstance(inner, PreTrainedModel):
                _refuse_kind(
                    f"`{name}`", type(inner), inner.config.is_encoder_decoder, _writes_text(inner, name), trains
                )
        elif isinstance(value, str):
            config = vars(arguments["args"])
            kwargs = config.get(option) or {}
            if isinstance(kwargs, dict) and _ELSEWHERE.isdisjoint(kwargs):
                loaded = {"revision": config.get(f"{name}_revision"), **kwargs}
                _refuse_named(value, f"`{name}={value!r}`", loaded, trains)


def _refuse_weightless(model: torch.nn.Module, name: str) -> None:
    """Refuse a model on the meta device, unless something else holds its weights."""
    is_placed = hasattr(model, "hf_device_map") or any(os.environ.get(each) == "true" for each in _ENGINES)
    if not is_placed and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"`{name}` is a {type(model).__name__} on the meta device, without weights: load it with "
            "`from_pretrained`, or make it outside of `torch.device('meta')`."
        )


def _writes_text(model: PreTrainedModel, name: str) -> bool:
    """Whether a model has a head for text and, if it is to be trained, the settings of generation that TRL writes."""
    has_head = model.get_output_embeddings() is not None
    return has_head and (name != "model" or hasattr(model, "generation_config"))


def _refuse_kind(what: str, found: type, has_encoder: bool, writes_text: bool, trains: str) -> None:
    """Refuse models that a trainer of language models, named `trains`, cannot train: `what` names the argument."""
    if has_encoder:
        raise ValueError(
            f"{what} is a {found.__name__}, which has an encoder and a decoder, and {trains} trains decoder-only "
            "models: pass one, as of `AutoModelForCausalLM`."
        )
    if not writes_text:
        raise ValueError(
            f"{what} is a {found.__name__}, which has no head for text, and {trains} trains language models: pass one, "
            "as of `AutoModelForCausalLM`. Models that classify or score rows are for the reward trainer."
        )


def _refuse_named(name: str, what: str, kwargs: dict[str, Any], trains: str) -> None:
    """Refuse a model that is given by its name, or by its folder: `what` names the argument."""
    revision = kwargs.get("revision")
    refuse_unreachable(name, what, revision)
    for file in sorted(Path(name).glob("*.safetensors")):
        if problem := why_unreadable(file):
            raise ValueError(f"{what}: {file.name} is damaged ({problem}). Copy it again, or download it again.")
    if not trains:
        return
    config: dict[str, Any] = {}
    with suppress(Exception):  # TRL says what is wrong when it loads the model
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision, token=kwargs.get("token"))
    # TRL loads a model as the class that its configuration names
    for architecture in (config.get("architectures") or ())[:1]:
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            _refuse_kind(what, found, bool(config.get("is_encoder_decoder")), found.can_generate(), trains)


def refuse_frozen(model: torch.nn.Module) -> None:
    """Refuse to train a model of which no weight trains. It may have been frozen while the trainer was made."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No weight of the model trains: all have `requires_grad=False`. Pass a `peft_config`, or call "
            "`model.requires_grad_(True)`."
        )
