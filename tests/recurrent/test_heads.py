"""Reward, KTO, GRPO, RLOO, distillation and turns of models whose layers carry state, padded TRL beside ours."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from tests.helpers.architectures import tiny_config, tiny_model
from tests.helpers.flat_and_padded import assert_padding_on_the_left_changes_nothing
from tests.helpers.tiny import DATA, SEED, arguments, conversations, different_pairs, lora, prompts
from tests.runs import compare, run
from trl_paddingfree import split_turns
from trl_paddingfree.recurrent.pieces import Pieces


def made(task, model_type):
    def make(seed=0, model_type=model_type, **vocabulary):
        return tiny_model(model_type, seed=SEED + seed, pad_token_id=0, **vocabulary)

    if task == "reward":
        torch.manual_seed(SEED)
        config = tiny_config(model_type, num_labels=1, pad_token_id=0)
        return arguments(task, False, AutoModelForSequenceClassification.from_config(config))
    model = make()
    teacher = partial(make, model_type="qwen3_next", vocab_size=model.config.vocab_size)
    adapted = lora(target_modules=["in_proj", "q_proj", "v_proj"])  # PEFT refuses others of Mamba's
    return {**arguments(task, True, model, make=teacher), "peft_config": adapted}


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
    data = different_pairs if task == "reward" else DATA[task]
    trainer = compare(task, partial(made, task, model_type), data(16, SEED), "shared").ours.trainer
    # Rounding may send a token of a mixture to another expert, and the check then takes rows, which are as exact
    assert trainer.runtime.route.states == "tree" or model_type == "qwen3_next"


def test_turns_hand_states_on_from_turn_to_turn_and_follow_padded_trl():
    def make():
        return arguments("sft", False, tiny_model("qwen3_5_text", seed=SEED))

    def answers(turn):
        """A second one, to the same prompt, continues it elsewhere: a turn alone continues the one before it."""
        again = turn["prompt"][-1]["content"]
        return [turn, turn | {"completion": [{"role": "assistant", "content": f"{again} {again}"}]}]

    data = Dataset.from_list([row for turn in split_turns(conversations(16, SEED)) for row in answers(turn)])
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8, "max_length": 128}
    trainer = compare("sft", make, data, "shared", **options).ours.trainer
    assert trainer.runtime.route.states == "tree"
    batches = [batch["flat_batch"] for batch in trainer.get_train_dataloader()]
    assert max(len(Pieces.of(batch.layout, None).levels) for batch in batches) > 1


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv"])
def test_padding_on_the_left_reaches_no_layer_where_it_does_in_padded_trl(model_type):
    given = {**made("grpo", model_type), "peft_config": None}
    trainer = run("grpo", "shared", **given, train_dataset=prompts(16, SEED), steps=1).trainer
    assert_padding_on_the_left_changes_nothing(trainer)


@pytest.mark.parametrize("model_type", ["minimax", "xlstm"])
def test_rows_as_long_as_a_layer_has_heads(model_type):
    """Weights or states `(rows, heads, ...)` of a group of rows then have the shape of its outputs."""
    data = Dataset.from_list([{"input_ids": [*range(5, 5 + length)]} for length in (9, 4, 7, 12, 4, 11, 4, 15)])
    compare("sft", lambda: arguments("sft", False, tiny_model(model_type)), data, "flat")
