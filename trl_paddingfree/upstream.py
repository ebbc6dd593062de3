"""What the package wants of private names of transformers and TRL, each with the reason why.

`tests/test_upstream.py` lists all of them, also those that the trainers extend or read on themselves, and fails by name
when an upgrade moves one. Public names are imported where they are used.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel


def attention_function(name: str, module: torch.nn.Module) -> Callable:
    """
    The attention function that `module` would call under the implementation `name`.

    "eager" is not in the registry: each modeling file has its own, with the model's soft-capping or sinks.
    """
    if name != "eager":
        return AttentionInterface()[name]
    return sys.modules[type(module).__module__].eager_attention_forward


def mask_function(name: str) -> Callable:
    """The mask function registered for the implementation `name`: padded calls keep the masks they had."""
    return AttentionMaskInterface()[name]


def text_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """
    `model` and the models within it that compute text: flat batches have no others.

    A vision tower keeps its own attention: Qwen's branches on the name, and would run chunk by chunk under ours.
    """
    is_text = model.config.get_text_config() is model.config
    modules = (model if is_text else model.get_decoder()).modules()
    return [module for module in modules if isinstance(module, PreTrainedModel)]


def takes_attention_function(model: PreTrainedModel) -> bool:
    """
    Whether every attention layer of `model` goes through `AttentionInterface`.

    Falcon and others look their attention class up in a dict of their own, where a new name is a `KeyError`.
    """
    return all(module._can_set_attn_implementation() for module in text_models(model))


def attn_implementation(model: PreTrainedModel) -> str:
    """The attention implementation in force, resolved by transformers (TRL #2834: what was asked for may not be)."""
    return model.config.get_text_config()._attn_implementation


def set_attn_implementation(model: PreTrainedModel, name: str) -> None:
    """
    Set a registered attention implementation on the text model and every part of it.

    The public `set_attn_implementation` re-checks what kernels the name stands for, and refuses some models (GPT-OSS)
    every name but a few.
    """
    model.config.get_text_config()._attn_implementation = name
    for module in text_models(model):
        module.config._attn_implementation = name


def rescale_by_position(query: torch.Tensor, module: Any, position_ids: np.ndarray) -> torch.Tensor:
    """
    Undo a scale of queries by their place on the flat axis, and scale by `position_ids`, the place in their own row.

    The layers of Llama 4 without rotary positions count `torch.arange` of their input and take no `position_ids`
    (`attn_temperature_tuning`). Below `floor_scale` tokens the scale is 1.
    """
    tuned = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if not tuned or query.size(2) < module.floor_scale:
        return query
    places = torch.stack([torch.arange(query.size(2)), torch.from_numpy(position_ids)]) + 1.0
    flat, row = torch.log1p(torch.floor(places / module.floor_scale)) * module.attn_scale + 1.0
    return (query * (row / flat).to(query.device)[:, None]).to(query.dtype)


def flash_attention_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """
    transformers' call of whichever flash attention `attn_implementation` names.

    The registered function takes the kernel's name from the model's config, where ours stands.
    """
    from transformers.modeling_flash_attention_utils import (
        _flash_attention_forward,
        flash_attn_supports_top_left_mask,
    )

    use_top_left_mask = flash_attn_supports_top_left_mask()
    return _flash_attention_forward(query, key, value, use_top_left_mask=use_top_left_mask, **kwargs)


def flash_target_dtype(query: torch.Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """The dtype to bring float32 states to (PEFT keeps norms in float32), by transformers' own rule."""
    from transformers.integrations.flash_attention import get_target_dtype

    return get_target_dtype(query, module)


def prepare_preferences(dataset: Any, tokenizer: Any, *, max_length: int | None, truncation_mode: str) -> Any:
    """TRL's own tokenization of preference data, and its dropping of rows, without a model."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig("unused", bf16=False, max_length=max_length, truncation_mode=truncation_mode)
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    return DPOTrainer._prepare_dataset(trainer, dataset, tokenizer, config, "train")


def prepare_instructions(dataset: Any, tokenizer: Any, *, max_length: int | None, truncation_mode: str) -> Any:
    """TRL's own tokenization of instruction data, its truncation and its dropping of rows, without a model."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig("unused", bf16=False, max_length=max_length, truncation_mode=truncation_mode)
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None,
        completion_only_loss={"prompt", "completion"} <= set(dataset.column_names),
    )
    return SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, config, False, None, "train")


def spoilt_by_evaluation(module: torch.nn.Module) -> bool:
    """
    Whether one call of `module` in evaluation mode spoils its training: keep it in training mode.

    On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks 4-bit weights for inference at the first such call, and the
    repacked layer passes no gradient on to its input.
    """
    return type(module).__module__.startswith("bitsandbytes.")
