"""Architectures that must work: flat and shared, on every route, forward and backward, against padded TRL."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from tests.helpers.architectures import is_older, proven, tiny_model, with_head
from tests.helpers.flat_and_padded import assert_equals_padded
from tests.helpers.pages import ROOT
from tests.helpers.reference_flash import reference_flash, torch_varlen_func
from tests.helpers.tiny import SEED, SHARING, arguments, conversations, preference_data
from tests.runs import assert_same, run
from trl_paddingfree.core.check.prove import UnprovenModelError
from trl_paddingfree.core.model.routes import Route, choose_route

MODELS = (ROOT / "docs" / "models.md").read_text()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}

PLAIN = (
    "dbrx gemma qwen2_moe qwen3_moe olmo2 olmo3 gpt_oss deepseek_v3 glm4 glm4_moe cohere2 exaone4 granitemoe "
    "llama4_text phimoe nemotron seed_oss apertus gpt_neox gpt2 opt"
)
# name: model type and options; rows are longer than the window where there is one
MUST_WORK = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"sliding_window": 8}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "falcon": ("falcon", {"new_decoder_architecture": True}),
    "falcon-multi-query": ("falcon", {"multi_query": True}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "qwen2": ("qwen2", SLIDING),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3_text", {}),
    "qwen3": ("qwen3", SLIDING),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "persimmon": ("persimmon", {"qk_layernorm": True}),
    **{name: (name, {}) for name in PLAIN.split()},
}
EAGER_ONLY = ["gemma2", "gpt_oss"]


def make(name, attention):
    """A model of `MUST_WORK` with TRL's fused head, in training mode without dropout."""
    model_type, options = MUST_WORK.get(name, (name, {}))
    model = tiny_model(model_type, attn_implementation=attention, seed=SEED, **options)
    return with_head(model).train(model_type != "phimoe")  # it draws its experts at random in training


@pytest.mark.parametrize("name", EAGER_ONLY[is_older("5.21") :])  # until then, sdpa left Gemma 2's soft-capping out
def test_attention_that_sdpa_cannot_compute_is_not_loaded_with_it(name):
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        make(name, "sdpa")


@pytest.mark.drawn(70)
@SHARING
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, kind) for name in MUST_WORK for kind in ("sdpa", "eager") if kind == "eager" or name not in EAGER_ONLY],
)
def test_architecture_equals_padded(name, attention, prefix_sharing):
    model = make(name, attention)
    route = choose_route(model)
    assert route.backend == ("mask" if "falcon" in name else "segment")
    if prefix_sharing:  # recomputation must meet the same layout
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equals_padded(model, replace(route, prefix_sharing=prefix_sharing), SEED)


@pytest.mark.drawn(30)
@SHARING
@pytest.mark.parametrize("name", [name for name in MUST_WORK if name != "llama4_text"])
def test_architecture_equals_padded_with_flash_attention(name, prefix_sharing):
    with reference_flash():
        model = make(name, "flash_attention_2")
        if name == "gpt2":  # its own code for flash attention looks for an `nn.Linear` in float32, and it has none
            for block in model.transformer.h:
                block.attn.unused = torch.nn.Linear(1, 1)
        route = choose_route(model)
        if "falcon" in name:
            assert route.backend == "positions"
            prefix_sharing = False
        assert_equals_padded(model, replace(route, prefix_sharing=prefix_sharing), SEED)


# PyTorch's kernel, which stands in where flash-attn is not installed, has neither soft-capping nor sinks
NO_STAND_IN = ["gemma2", "gpt_oss"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for attention in (None, "flash_attention_2") for name in MUST_WORK if name != "llama4_text"],
)
def test_architecture_passes_the_check_with_the_kernels_of_a_gpu(name, attention):
    installed = is_flash_attn_2_available()
    if attention and not installed and name in NO_STAND_IN:
        pytest.skip("needs flash-attn")
    with reference_flash(torch_varlen_func) if attention and not installed else nullcontext():
        result = proven(make(name, attention).bfloat16().cuda())
    assert result.prefix_sharing == (result.route.backend != "positions")
    assert result.route.backend in (("flash", "positions") if attention else ("varlen", "segment", "mask"))


@pytest.mark.parametrize("name", ["bart", "roberta", "openai-gpt"])
def test_architecture_that_cannot_be_told_is_refused_with_the_reason(name):
    reason = {"bart": "no `position_ids`", "roberta": "positions from 2", "openai-gpt": "masks from a 2-D one"}[name]
    model = make(name, None)
    with pytest.raises(UnprovenModelError, match=reason):
        proven(model)


def test_backbone_that_trl_does_not_find_is_refused_with_the_remedy():
    model = tiny_model("llama4_text")
    with pytest.raises(ValueError, match="base_model_prefix = 'model'"):
        choose_route(model)


@pytest.mark.parametrize("task", ["dpo", "sft"])
@pytest.mark.parametrize("name", ["falcon", "gemma3", "gpt_oss", "deepseek_v3", "llama4_text", "nemotron"])
def test_architecture_trains_like_padded_trl(name, task):
    data = (preference_data if task == "dpo" else conversations)(12, SEED)
    options = {"train_dataset": data, "steps": 2, "max_length": 64}
    options["router_aux_loss_coef"] = 0.0 if name == "llama4_text" else None

    def trained(layout):
        model = make(name, None)
        return run(task, layout, **arguments(task, False, model, make=lambda seed: make(name, None)), **options)

    assert_same(trained("padded"), trained("shared"))


def test_the_text_above_the_table_of_models_is_that_of_its_script():
    from scripts.model_table import HEADER

    assert MODELS.startswith(HEADER.format(version=re.search(r"in transformers ([\d.]+)\.\n", MODELS)[1]))


@pytest.mark.models
def test_the_table_of_models_is_up_to_date():
    from scripts.model_table import markdown, table, verdicts
    from tests.helpers.architectures import MODEL_TYPES

    written = verdicts(MODELS)
    assert written == verdicts(markdown(table(MODEL_TYPES))), "run `python scripts/models.py --output docs/models.md`"


def test_gemma3_trains_on_text_without_token_types():
    """trl#5807."""
    model = with_head(tiny_model("gemma3")).train()
    assert_equals_padded(model, Route("segment", "sdpa", prefix_sharing=True), SEED)
