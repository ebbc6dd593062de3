"""Shapes of models, by name: what `inspect --model` and the benchmark know without a model."""

from typing import Any

from transformers import AutoConfig


def _decoder(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, key_heads: int, words: int, tied: bool = True
) -> dict[str, Any]:
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
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 16, 32, 8, 128256),
    "qwen2.5-0.5b": _decoder("qwen2", 896, 4864, 24, 14, 2, 151936),
    "qwen2.5-7b": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "smollm2-135m": _decoder("llama", 576, 1536, 30, 9, 3, 49152),
    # The layers of LFM2-350M, 10 convolutions and 6 attentions in its order, narrowed: 256 of its 1024 channels, 768 of
    # 4608 within the MLP, 4 of 16 heads, 2 of 8 key heads, 8192 of 65536 words
    "lfm2-350m-narrow": {
        **_decoder("lfm2", 256, 768, 16, 4, 2, 8192),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    # Layers in the order of Qwen3.5's, three gated delta nets before each attention, few and narrow, and 8192 of its
    # 248320 words
    "qwen3.5-narrow": {
        **_decoder("qwen3_5_text", 256, 896, 8, 4, 1, 8192),
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    },
    # Too small for any device: what a step costs on the host
    "tiny": _decoder("llama", 64, 128, 4, 4, 2, 1024),
}


def model_config(name: str) -> Any:
    """The configuration of a named shape, or of a folder or model id."""
    return AutoConfig.for_model(**SHAPES[name]) if name in SHAPES else AutoConfig.from_pretrained(name)
