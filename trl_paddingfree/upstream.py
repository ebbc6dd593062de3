"""What the package wants of private names of transformers and TRL, each with the reason why.

`tests/test_upstream.py` lists all of them, also those that the trainers extend or read on themselves, and fails by name
when an upgrade moves one. Public names are imported where they are used.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
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


def prepare_pairs(dataset: Any, tokenizer: Any, *, max_length: int | None, truncation_mode: str) -> Any:
    """TRL's own tokenization of pairs for reward models, and its dropping of rows, without a model."""
    from trl import RewardConfig, RewardTrainer

    trainer: Any = SimpleNamespace()
    config = RewardConfig("unused", bf16=False, max_length=max_length)
    return RewardTrainer._prepare_dataset(trainer, dataset, tokenizer, config, "train")


def prepare_unpaired(dataset: Any, tokenizer: Any, *, max_length: int | None, truncation_mode: str) -> Any:
    """TRL's own tokenization of unpaired preferences, and its dropping of rows, without a model."""
    from trl import KTOConfig, KTOTrainer

    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    config = KTOConfig("unused", bf16=False, max_length=max_length)
    return KTOTrainer._prepare_dataset(trainer, dataset, tokenizer, config, "inspected")


def prepare_prompts(dataset: Any, tokenizer: Any, *, max_length: int | None, truncation_mode: str) -> Any:
    """TRL's own tokenization of prompts, which are never truncated, without a model."""
    from trl import RLOOTrainer

    trainer: Any = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs={})
    tokenize = lambda rows: {"prompt_ids": RLOOTrainer._tokenize_prompts(trainer, rows["prompt"])[0]}  # noqa: E731
    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)


def spoilt_by_evaluation(module: torch.nn.Module) -> bool:
    """
    Whether one call of `module` in evaluation mode spoils its training: keep it in training mode.

    On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks 4-bit weights for inference at the first such call, and the
    repacked layer passes no gradient on to its input.
    """
    return type(module).__module__.startswith("bitsandbytes.")


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


def keep_varlen_results(model: Any) -> None:
    """
    Have TRL's selective checkpointing keep the results of PyTorch's varlen kernel too.

    Its policy knows ATen's attention and operators with "flash_attn" in their names, and recomputes all others. It is
    replaced where transformers keeps it, each time that checkpointing is enabled; without `selective`, nothing is.
    """
    enable = model.gradient_checkpointing_enable
    if not getattr(enable, "_is_sac_wrapped", False) or getattr(enable, "keeps_varlen", False):
        return

    def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        for module in model.modules():
            if (checkpoint := vars(module).get("_gradient_checkpointing_func")) is not None:
                contexts = _keeping_varlen(checkpoint.keywords["context_fn"])
                module._gradient_checkpointing_func = partial(checkpoint, context_fn=contexts)

    gradient_checkpointing_enable._is_sac_wrapped = True  # type: ignore[attr-defined]
    gradient_checkpointing_enable.keeps_varlen = True  # type: ignore[attr-defined]
    model.gradient_checkpointing_enable = gradient_checkpointing_enable


def _keeping_varlen(contexts: Callable) -> Callable:
    """`contexts`, TRL's `partial(create_selective_checkpoint_contexts, policy)`, with a policy that keeps one more."""
    (policy,) = contexts.args  # type: ignore[attr-defined]

    def keeping(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if str(op) == "torch_attn._varlen_attn.default":
            return CheckpointPolicy.MUST_SAVE
        return policy(ctx, op, *args, **kwargs)

    return partial(create_selective_checkpoint_contexts, keeping)


# transformers' functions that have a kernel which takes boundaries, and the argument that tells it of them. A scan of
# the first Mamba is not among them: no kernel of it knows of boundaries
_STATE_FUNCTIONS = {
    "causal_conv1d_fn": "seq_idx",
    "mamba2_chunk_scan": "seq_idx",
    "torch_chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kimi_delta_attention": "cu_seqlens",
}
_SCAN_WITHOUT_BOUNDARIES = "mamba_selective_scan"
# What transformers raises where it has no kernel that keeps sequences apart, with the package that has it
_MISSING_KERNEL = re.compile(r"can't keep packed sequences apart without `([\w-]+)`")


def _state_functions(module: torch.nn.Module) -> dict[str, Callable]:
    """The functions of transformers that the forward of a layer calls and that may have kernels."""
    forward = inspect.unwrap(type(module).forward)
    called = {*_STATE_FUNCTIONS, _SCAN_WITHOUT_BOUNDARIES}.intersection(forward.__code__.co_names)
    return {name: forward.__globals__[name] for name in sorted(called)}


def missing_state_kernels(module: torch.nn.Module) -> list[str]:
    """
    Packages whose kernels a layer with a state would call, and that are not installed.

    transformers looks for them when it is imported, and keeps what it found to itself. But where it has none it refuses
    boundaries before it looks at anything else.
    """
    missing = []
    for name, function in _state_functions(module).items():
        if name == _SCAN_WITHOUT_BOUNDARIES:
            missing += [] if find_spec("mamba_ssm") else ["mamba-ssm"]
            continue
        try:
            function(**{_STATE_FUNCTIONS[name]: True})
        except ValueError as error:
            missing += [package.replace("_", "-") for package in _MISSING_KERNEL.findall(str(error))]
        except TypeError:  # a kernel, which misses its tensors
            pass
    return missing


def takes_state_boundaries(module: torch.nn.Module) -> bool:
    """Whether a layer with a state keeps the rows of one long axis apart, told of their boundaries."""
    functions = _state_functions(module)
    # What transformers' decorator does not wrap has no kernel, and drops boundaries without a word (LFM3)
    has_kernels = all(hasattr(function, "__wrapped__") for function in functions.values())
    known = bool(functions) and _SCAN_WITHOUT_BOUNDARIES not in functions
    return known and has_kernels and not missing_state_kernels(module)


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


def lm_head_tile() -> tuple[int, int]:
    """Rows and columns of the logits that TRL's fused LM head has in memory at a time."""
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    return TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE
