"""The trainers that are compared, and their models: with weights from a folder or the hub, or random ones by shape."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_paddingfree.cli.quickstart import side_by_side
from trl_paddingfree.core import upstream

from .shapes import SHAPES
from .tasks import PACKED, Method, Settings


def make_model(name: str, dtype: torch.dtype, device: str) -> Any:
    """A model with random weights if `name` is a key of `SHAPES`, or one from a folder or with a model id."""
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device})
    config = AutoConfig.for_model(**SHAPES[name], max_position_embeddings=8192)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second instance of `model` that has the very same weights in memory. For weights that stay frozen."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def make_tokenizer(
    words: Sequence[str] = ("a", "b"), special: Sequence[str] = ("<pad>", "<eos>", "<unk>")
) -> PreTrainedTokenizerFast:
    """A tokenizer of words between spaces. By default, there is little beside the padding: rows hold token ids."""
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def display_name(model: str) -> str:
    """A short name of a model for tables."""
    return model if model in SHAPES else Path(model).name


def make_trainer(method: Method, base: Any, settings: Settings, attention: str) -> Any:
    """
    The trainer of a method, after one step of its `train()` on a few tokens: all is set up as in real training.

    Its weights are those of `base`, shared where they stay frozen; TRL's own methods have the attention of that name.
    """
    # LoRA leaves the weights alone
    arguments: dict[str, Any] = {"model": copy.deepcopy(base) if settings.tuning == "full" else same_weights(base)}
    if settings.tuning != "full":
        arguments["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    elif settings.benchmarked.has_reference and not settings.precomputed_reference:
        arguments["ref_model"] = same_weights(base)
    for model in [] if method.ours else [arguments["model"], arguments.get("ref_model")]:
        if model is not None:
            upstream.set_attn_implementation(model, method.attention or attention)
    trainer = side_by_side.make_trainer(
        *side_by_side.classes_of(settings.task, method.ours),
        {**_options(method, settings), **method.options},
        train_dataset=Dataset.from_list([settings.benchmarked.text] * settings.batch_size),
        processing_class=make_tokenizer(),
        **arguments,
    )
    trainer.train()
    return trainer


def _options(method: Method, settings: Settings) -> dict[str, Any]:
    """Options that all configurations have in common."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": settings.batch_size,
        "max_length": settings.max_length,
        "max_steps": 1,
        "bf16": settings.torch_dtype == torch.bfloat16,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "use_cpu": not settings.on_accelerator,
        "seed": 0,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    if settings.learning_rate is not None:
        options["learning_rate"] = settings.learning_rate
    if settings.benchmarked.has_reference:
        options["precompute_ref_log_probs"] = settings.precomputed_reference
    # The rows are truncated already
    return options if settings.benchmarked.truncates or method.options == PACKED else options | {"max_length": None}
