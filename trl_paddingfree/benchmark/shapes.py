"""Models to measure: real shapes with random weights, or a folder."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# Sizes from the configurations that the models were published with
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    # The layers of LFM2-350M, 10 convolutions and 6 attentions in its order, narrowed: 256 of its 1024 channels, 768 of
    # 4608 within the MLP, 4 of 16 heads, 2 of 8 key heads, 8192 of 65536 words
    "lfm2-350m-narrow": {
        "model_type": "lfm2",
        "hidden_size": 256,
        "intermediate_size": 768,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "conv_L_cache": 3,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "tie_word_embeddings": True,
    },
    # Too small for any device: what a step costs on the host
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}


def make_model(name: str, dtype: torch.dtype, device: str, seed: int = 0, load_in_4bit: bool = False) -> Any:
    """
    A model with random weights, or one from a folder.

    Args:
        name (`str`):
            A key of `SHAPES`, or a folder or model id.
        dtype (`torch.dtype`):
            Dtype of the weights.
        device (`str`):
            Device of the weights.
        seed (`int`, *optional*, defaults to `0`):
            Seed of random weights.
        load_in_4bit (`bool`, *optional*, defaults to `False`):
            Whether to quantize the weights with bitsandbytes.
    """
    if name not in SHAPES:
        if load_in_4bit:
            return load_4bit(name, dtype, device)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map={"": device})
    config = AutoConfig.for_model(**SHAPES[name], max_position_embeddings=8192)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not load_in_4bit:
        return model
    with tempfile.TemporaryDirectory() as folder:  # weights are quantized while they are loaded
        model.save_pretrained(folder)
        del model
        return load_4bit(folder, dtype, device)


def load_4bit(path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model from a folder, its linear layers in 4 bits, prepared as QLoRA prepares it."""
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=quantization, device_map={"": device}
    )


def same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second instance of `model` that has the very same weights in memory. For weights that stay frozen."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a padding token and little else: the rows hold token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def display_name(model: str) -> str:
    """A short name of a model for tables."""
    return model if model in SHAPES else Path(model).name
