"""Distillation, padded TRL beside ours: student and teacher compute one flat batch of the generated rows."""

import os

import pytest

from tests.helpers.dpo_runs import lora
from tests.helpers.head_runs import assert_layouts_agree, prompts
from tests.helpers.tiny import make_model, make_tokenizer

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])


@pytest.fixture(scope="module")
def data():
    """Prompts of very different lengths, each for two completions that lie side by side."""
    rows = prompts(8, SEED)
    return rows.select([i for i in range(8) for _ in range(2)])


def plain(model_type="llama", **overrides):
    teacher = make_model(model_type, seed=1, **overrides)
    return {"model": make_model(), "teacher_model": teacher, "processing_class": make_tokenizer()}


def with_lora():
    return {**plain(), "peft_config": lora()}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_every_divergence_follows_padded_trl(data, beta):
    assert_layouts_agree("distillation", plain, data, beta=beta, temperature=0.7)
