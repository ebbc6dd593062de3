"""Reward models and KTO under a memory budget: predicted bytes are counted ones, and no decision changes a figure."""

import os

import pytest

from tests.helpers.dpo_runs import lora
from tests.helpers.equivalence import assert_same
from tests.helpers.head_runs import reward_model, train, unpaired
from tests.helpers.memory import assert_predicted, between
from tests.helpers.tiny import make_model, make_tokenizer, preference_data
from trl_paddingfree.memory.device import GIB

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
LAYERS = 3


def reward():
    return {"model": reward_model(num_hidden_layers=LAYERS), "processing_class": make_tokenizer()}


def kto():
    return {"model": make_model(num_hidden_layers=LAYERS), "processing_class": make_tokenizer(), "peft_config": lora()}


TASKS = {"reward": (reward, preference_data), "kto": (kto, unpaired)}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_predicted_bytes_are_counted_ones(task, layout):
    make, data = TASKS[task]
    trained = train(task, layout, make, data(24, SEED), per_device_train_batch_size=8, memory_budget=8)
    assert_predicted(trained.trainer)


@pytest.mark.parametrize("task", TASKS)
def test_a_budget_changes_no_figure(task):
    make, data = TASKS[task]
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    data = data(32, SEED)
    padded = train(task, "padded", make, data, **options)
    whole = train(task, "shared", make, data, memory_budget=8, **options)
    assert_same(padded, whole)
    budget = between(whole.trainer, 2)
    some = train(task, "shared", make, data, memory_budget=budget, **options)
    assert_same(padded, some)
    assert sum(entry["flat/recomputed"] for entry in some.log_history if "loss" in entry) > 0
    fixed = whole.trainer.flat.memory.needs.fixed / GIB
    least = fixed + (between(whole.trainer, LAYERS) - fixed) / 2
    if task == "kto":  # its loss couples the examples of a micro-batch: gradients of parts are added up beside
        least += whole.trainer.flat.budget.gradient_bytes / GIB
    parts = train(task, "shared", make, data, memory_budget=least, **options)
    assert_same(padded, parts)
    largest = max(entry["flat/predicted_memory_gib"] for entry in parts.log_history if "loss" in entry)
    assert largest <= least < budget
