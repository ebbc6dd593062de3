"""Reward, KTO, GRPO and RLOO of models whose layers carry state, padded TRL beside ours."""

import os

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.architectures import tiny_config, tiny_model
from tests.helpers.dpo_runs import lora
from tests.helpers.head_runs import (
    assert_layouts_agree,
    assert_padding_on_the_left_changes_nothing,
    prompts,
    score,
    train,
    unpaired,
)
from tests.helpers.tiny import make_tokenizer, preference_data

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])


def rewarding(model_type):
    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_config(tiny_config(model_type, num_labels=1, pad_token_id=0))
    return {"model": model, "processing_class": make_tokenizer()}


def adapted(model_type):
    model = tiny_model(model_type, seed=SEED, pad_token_id=0)
    modules = ["in_proj", "q_proj", "v_proj"]  # PEFT refuses others of Mamba's
    return {"model": model, "processing_class": make_tokenizer(), "peft_config": lora(target_modules=modules)}


def generating(model_type):
    return {**adapted(model_type), "reward_funcs": score}


HEADS = {
    "reward": (rewarding, lambda: preference_data(16, SEED).filter(lambda row: row["chosen"] != row["rejected"])),
    "kto": (adapted, lambda: unpaired(16, SEED)),
    "grpo": (generating, lambda: prompts(16, SEED)),
    "rloo": (generating, lambda: prompts(16, SEED)),
}


@pytest.mark.parametrize(
    ("task", "model_type"),
    [
        ("reward", "qwen3_next"),
        ("reward", "zamba2"),
        ("kto", "falcon_h1"),
        ("kto", "lfm2"),
        ("grpo", "lfm2"),
        ("grpo", "falcon_h1"),
        ("rloo", "qwen3_next"),
    ],
)
def test_training_follows_padded_trl(task, model_type):
    make, data = HEADS[task]
    result = assert_layouts_agree(task, lambda: make(model_type), data(), ("shared",))
    assert result.trainer.total_counts().repeated
    assert "flat/repeated_by_state_layers" in result.log_history[0]


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv"])
def test_padding_on_the_left_reaches_no_layer_where_it_does_in_padded_trl(model_type):
    def make():
        return {**generating(model_type), "peft_config": None}

    trainer = train("grpo", "shared", make, prompts(16, SEED), steps=1).trainer
    assert_padding_on_the_left_changes_nothing(trainer)
