"""Shapes of models by name: those of `inspect --model`, and narrow ones whose layers carry state."""

from typing import Any

from trl_paddingfree.budgets import predict

SHAPES: dict[str, dict[str, Any]] = {
    **predict.SHAPES,
    # The layers of LFM2-350M, 10 convolutions and 6 attentions in its order, narrowed: 256 of its 1024 channels, 768 of
    # 4608 within the MLP, 4 of 16 heads, 2 of 8 key heads, 8192 of 65536 words
    "lfm2-350m-narrow": {
        **predict.decoder("lfm2", 256, 768, 16, 4, 2, 8192),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    # Small enough for long rows on two cores
    "llama-narrow": predict.decoder("llama", 256, 768, 4, 4, 2, 8192),
    # Layers in the order of Qwen3.5's, three gated delta nets before each attention, few and narrow, and 8192 of its
    # 248320 words
    "qwen3.5-narrow": {
        **predict.decoder("qwen3_5_text", 256, 896, 8, 4, 1, 8192),
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    },
}
