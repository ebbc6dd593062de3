"""Every causal language model of transformers, made small enough to build, prove and run in a fraction of a second."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

from trl_paddingfree.core.check.prove import CheckResult, prove
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.versions import TESTED

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Configurations that do not build small, or without packages that are not installed; docs/models.md gives the reasons
NOT_BUILT = ("dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody")

# Sizes by name, for whichever configuration has the name. Windows and chunks are shorter than the rows that the
# start-up check tries, weights larger than usual, so that a wrong context shows in the figures.
_NAMES = {
    96: """vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size
        encoder_hash_byte_group_vocab""",
    32: """hidden_size d_model n_embd emb_dim embedding_size embed_dim lru_width attention_hidden_size dim_model_base
        vision_output_dim output_hidden_size input_embedding_size output_embedding_size projector_hidden_size
        hidden_size_global adapter_in_dim adapter_input_size""",
    48: """intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size
        dense_intermediate_size shared_intermediate_size d_inner feed_forward_size""",
    24: """moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp expert_ffn_hidden_size
        prefix_dense_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    16: """index_n_heads indexer_n_heads q_lora_rank kv_lora_rank qk_head_dim mamba_d_head mamba_head_dim mamba_headdim
        laurel_rank query_pre_attn_scalar adapter_rank image_size gated_norm_rank""",
    8: """head_dim global_head_dim swa_head_dim dim_head kv_channels attention_head_dim sliding_window window_size
        attention_chunk_size sliding_window_size attention_window_size mamba_d_state ssm_state_size state_size
        mamba_chunk_size chunk_size v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim
        linear_value_head_dim index_head_dim indexer_head_dim hidden_size_per_layer_input local_attention rotary_dim
        floor_scale linear_head_dim keep_window_size shape_vocab_size pronunciation_vocab_size""",
    4: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts
        moe_num_experts mamba_n_heads mamba_num_heads indexer_head_num linear_num_value_heads
        swa_num_attention_heads mamba_dt_rank time_step_rank zero_expert_num index_block_size""",
    2: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers depth
        num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k top_k_experts
        num_experts_per_token linear_num_key_heads num_query_groups swa_num_key_value_heads index_topk vision_depth
        num_blocks num_global_layers index_topk_blocks""",
    1: """n_shared_experts n_group topk_group num_group num_expert_group n_groups mamba_n_groups mamba_ngroups
        first_k_dense_replace num_mem_blocks num_nextn_predict_layers""",
    512: """max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length""",
    0.2: """initializer_range init_std embed_init_std""",
}
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
# Also where they are unset by default
_ALWAYS = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")


def is_older(version: str) -> bool:
    """Whether transformers is older than `version`."""
    return Version(transformers.__version__) < Version(version)


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of an architecture; `overrides` go before the tiny values."""
    if model_type not in CONFIG_MAPPING and is_older(TESTED["transformers"][1]):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    if model_type == "recurrent_gemma" and is_older("5.23"):
        pytest.skip("the start-up check refuses RecurrentGemma: it takes no mask but its own")
    return AutoConfig.for_model(model_type, **{**_shrunk(AutoConfig.for_model(model_type)), **overrides})


def tiny_model(model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny model with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides)).to(dtype).eval()


def with_head(model, **options):
    """A model with TRL's fused head, whose backbone is named as docs/models.md says where TRL finds none."""
    if model.base_model is model:
        model.base_model_prefix = "model"
    add_fused_lm_head(model, **options)
    return model


def proven(model: PreTrainedModel, **options: Any) -> CheckResult:
    """What the start-up check finds of a model whose first route passes."""
    result, failed = prove(model, choose_route(model), **options)
    assert not failed
    return result


def _shrunk(config):
    """Arguments that make this configuration, and those within it, tiny."""
    values = vars(config)
    tiny = {name: SIZES[name] for name in values if name in SIZES and (values[name] is not None or name in _ALWAYS)}
    for name, value in values.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= SIZES["vocab_size"]:
            tiny[name] = 0 if name == "pad_token_id" else 1
        elif "drop" in name and isinstance(value, float):
            tiny[name] = 0.0
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types") and value:
            tiny[name] = list(dict.fromkeys(value))
    if values.get("kv_lora_rank"):  # latent attention has a key for every head
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    if "is_decoder" in values:  # BERT and its kind see what follows otherwise
        tiny["is_decoder"] = True
    lists = [value for value in tiny.values() if isinstance(value, list)]
    if lists:  # one layer of each kind, in every list
        length = max(2, *map(len, lists))
        tiny |= {name: (value * length)[:length] for name, value in tiny.items() if isinstance(value, list)}
        tiny |= {name: length for name in ("num_hidden_layers", "n_layer", "num_layers") if name in tiny}
    for name in config.sub_configs:
        if isinstance(values.get(name), PreTrainedConfig):
            tiny[name] = _shrunk(values[name])
    return tiny | OVERRIDES.get(config.model_type, {})


# What differs from the sizes above, by the type of the configuration: shapes that depend on each other, and options
# without which the model has nothing to get wrong
OVERRIDES = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        }
    },
    "dbrx": {  # its clamp of queries and keys takes no bounds of `None`
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim", "swa_qk_rope_head_dim"), 8),
        **dict.fromkeys(("num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank"), 16),
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "no_rope_layers": [1, 0],
        "attn_scale": 10.0,  # queries of layers without rotary positions grow every `floor_scale` tokens
    },
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"index_n_heads": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass
class Valued(CausalLMOutputWithPast):
    """An output with a field that has the name of a method."""

    values: torch.Tensor | None = None


def with_values(model):
    """With a head beside its own, of one value per token, that ends in the same gradients."""

    class Head(type(model)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            labels = kwargs.pop("labels", None)
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
            return Valued(loss=loss, logits=logits, values=self.value(hidden).squeeze(2))

    model.__class__ = Head
    torch.manual_seed(4)
    model.value = torch.nn.Linear(32, 1)
    return model
