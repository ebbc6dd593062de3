"""Shapes of models, by name: what `inspect --model` knows without a model."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

Shape = dict[str, Any]  # fields of a configuration


def decoder(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, key_heads: int, words: int, tied: bool = True
) -> Shape:
    """The shape of a decoder, for [`~transformers.AutoConfig`]."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": words,
        "tie_word_embeddings": tied,
    }


# Sizes from the configurations that the models were published with
SHAPES: dict[str, Shape] = {
    "llama-3-8b": decoder("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
    "llama-3.2-1b": decoder("llama", 2048, 8192, 16, 32, 8, 128256),
    "qwen2.5-0.5b": decoder("qwen2", 896, 4864, 24, 14, 2, 151936),
    "qwen2.5-7b": decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "smollm2-135m": decoder("llama", 576, 1536, 30, 9, 3, 49152),
    # Too small for any device: what a step costs on the host
    "tiny": decoder("llama", 64, 128, 4, 4, 2, 1024),
}


def model_config(name: str, shapes: dict[str, Shape] = SHAPES) -> PreTrainedConfig:
    """The configuration of a named shape, or of a folder or model id."""
    return AutoConfig.for_model(**shapes[name]) if name in shapes else AutoConfig.from_pretrained(name)
