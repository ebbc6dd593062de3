"""Reward, KTO, GRPO, RLOO, distillation and turns of models whose layers carry state, padded TRL beside ours."""

import os

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.helpers.architectures import tiny_config, tiny_model
from tests.helpers.flat_and_padded import assert_padding_on_the_left_changes_nothing
from tests.helpers.tiny import conversations, lora, make_tokenizer, preference_data, prompts, score, unpaired
from tests.runs import compare, run
from trl_paddingfree import split_turns
from trl_paddingfree.flat.pieces import Pieces

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


def taught(model_type):
    vocabulary = {"vocab_size": tiny_config(model_type).vocab_size}
    return {
        **adapted(model_type),
        "teacher_model": tiny_model("qwen3_next", seed=SEED + 1, pad_token_id=0, **vocabulary),
    }


HEADS = {
    "reward": (rewarding, lambda: preference_data(16, SEED).filter(lambda row: row["chosen"] != row["rejected"])),
    "kto": (adapted, lambda: unpaired(16, SEED)),
    "grpo": (generating, lambda: prompts(16, SEED)),
    "rloo": (generating, lambda: prompts(16, SEED)),
    "distillation": (taught, lambda: prompts(16, SEED)),
}


@pytest.mark.drawn(3)
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
        ("distillation", "lfm2"),
    ],
)
def test_training_follows_padded_trl(task, model_type):
    make, data = HEADS[task]
    trainer = compare(task, lambda: make(model_type), data(), ("shared",)).ours.trainer
    # Rounding may send a token of a mixture to another expert, and the check then takes rows, which are as exact
    assert trainer.flat.route.states == "tree" or model_type == "qwen3_next"


def test_turns_hand_states_on_from_turn_to_turn_and_follow_padded_trl():
    def make():
        return {"model": tiny_model("qwen3_5_text", seed=SEED), "processing_class": make_tokenizer()}

    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8, "max_length": 128}
    trainer = compare("sft", make, split_turns(conversations(16, SEED)), ("shared",), **options).ours.trainer
    assert trainer.flat.route.states == "tree"
    batches = [batch["flat_batch"] for batch in trainer.get_train_dataloader()]
    assert max(len(Pieces.of(batch.layout, None).levels) for batch in batches) > 1


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv"])
def test_padding_on_the_left_reaches_no_layer_where_it_does_in_padded_trl(model_type):
    def make():
        return {**generating(model_type), "peft_config": None}

    trainer = run("grpo", "shared", **make(), train_dataset=prompts(16, SEED), steps=1).trainer
    assert_padding_on_the_left_changes_nothing(trainer)
