"""Budgets that are too small, or stand beside what they cannot, are refused by name."""

import re
from itertools import product

import pytest
import torch
from datasets import concatenate_datasets
from transformers import LlamaForCausalLM

from tests.helpers.memory import budgeted, layered, with_images
from tests.helpers.refused import build
from tests.helpers.tiny import DATA, ROUTED, SEED, arguments, conversations, make_model, preference_data
from tests.helpers.vision import vision_pairs
from tests.runs import make_trainer, run
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.device import budget_bytes
from trl_paddingfree.core.device import GIB
from trl_paddingfree.core.trainers.proving import StartUpCheck


@pytest.mark.parametrize("task", ["dpo", "sft", "reward", "grpo"])
def test_a_budget_that_holds_no_step_is_refused_before_anything_is_proven(task, monkeypatch):
    """With the least budget, which is refused no second time; of a stream, with what training takes without tokens."""

    def make(**options):
        return make_trainer(task, "ours", **{**arguments(task, False), "train_dataset": DATA[task](8, SEED), **options})

    with monkeypatch.context() as unproven:
        unproven.setattr(StartUpCheck, "prove_all", lambda *args: pytest.fail("proven"))
        with pytest.raises(ValueError, match=r"`memory_budget=1e-06` .* is less than .* at least [\d.]+") as error:
            make(memory_budget=1e-6)
        stream = DATA[task](8, SEED).to_iterable_dataset()
        if task != "grpo":  # which knows how long its prompts may be
            with pytest.raises(ValueError, match="is less than training needs before its first token: weights, "):
                make(memory_budget=1e-6, train_dataset=stream)
    least = float(re.search(r"at least ([\d.]+), or", str(error.value))[1])
    make(memory_budget=least, steps=1).train()


@pytest.mark.slow
def test_a_budget_that_an_example_does_not_fit_into_is_refused(folder):
    data = preference_data(16, SEED)
    with pytest.raises(ValueError, match=r"`memory_budget=0.0001`.* is less than example \d+ of the.* at least [\d.]+"):
        budgeted("dpo", folder, data, memory_budget="0.0001")
    try:
        budgeted("dpo", folder, data, memory_budget=0.0001)
    except ValueError as error:
        least = float(re.search(r"at least ([\d.]+), or", str(error))[1])
        without_tokens = float(re.search(r"take ([\d.]+) GiB of that", str(error))[1])
    run("dpo", "ours", model=folder, train_dataset=data, memory_budget=least, steps=1)
    stream = data.to_iterable_dataset()
    with pytest.raises(ValueError, match="is less than a micro-batch needs"):
        run("dpo", "ours", model=folder, train_dataset=stream, memory_budget=without_tokens + 0.001, steps=1)
    run("dpo", "ours", model=folder, train_dataset=stream, memory_budget=least, steps=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_offloading": True}, "activation_offloading=True"),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "'selective': True"),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "'every_n_layers': 2"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'` steps within each backward pass"),
        (
            {"memory_budget": None, "max_tokens_per_micro_batch": 100, "optim": "adalomo"},
            "optim='adalomo'` steps within each backward pass",
        ),
        ({"memory_budget": -1}, "must be a positive number"),
        ({"memory_budget": "much"}, "must be a positive number"),
    ],
)
def test_what_a_budget_cannot_stand_beside_is_refused(folder, options, reason):
    with pytest.raises(ValueError, match=reason):
        budgeted("sft", folder, conversations(8, SEED), **options)


@pytest.mark.parametrize(
    "budget",
    [{"memory_budget": 8}, {"max_tokens_per_micro_batch": 100, "gradient_checkpointing": True}],
    ids=["memory", "tokens"],
)
def test_a_router_loss_beside_reentrant_recomputation_is_refused(tokenizer, budget):
    def make(**options):
        given = {"processing_class": tokenizer, "memory_budget": None, **options}
        return budgeted("sft", make_model("mixtral", **ROUTED), conversations(8, SEED), **given)

    for kwargs in ({"use_reentrant": True}, {"preserve_rng_state": True}):  # PyTorch's default is reentrant
        reentrant = {"gradient_checkpointing_kwargs": kwargs}
        with pytest.raises(ValueError, match="'use_reentrant': True.*router_aux_loss_coef=0.3"):
            make(**budget, **reentrant)
        make(**reentrant)
        make(max_tokens_per_micro_batch=100, gradient_checkpointing=False, **reentrant)  # nothing recomputes
    make(**budget)


@pytest.mark.parametrize("budget", [10**6, "24e9"], ids=["of a cluster", "in bytes"])
def test_more_than_the_machine_has_is_refused_before_a_model_is_loaded(budget):
    with pytest.raises(ValueError, match=r"`memory_budget=.*` is in GiB, and more than this machine's \d+\.\d GiB"):
        budgeted("sft", "a-model/that-is-not-there", conversations(8, SEED), memory_budget=budget)


def test_more_than_an_accelerator_has_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 2 * GIB)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"500.0` is in GiB, and more than the 24.0 GiB of cuda:0.*'auto'\.$"):
        budget_bytes(500.0, gpu)
    with pytest.raises(ValueError, match=r"Did you mean 22\.4\?"):
        budget_bytes("24e9", gpu)
    assert budget_bytes(24.0, gpu) == 24 * GIB
    assert budget_bytes("auto", gpu) == int(0.9 * 22 * GIB)


def test_a_budget_that_the_longest_completion_does_not_fit_into_is_refused(data):
    def least(**options):
        with pytest.raises(ValueError, match=r"`max_completion_length=\d+` needs: .* at least [\d.]+") as error:
            run("grpo", "shared", **layered("grpo"), train_dataset=data, memory_budget=0.0001, **options)
        return float(re.search(r"at least ([\d.]+), or", str(error.value))[1])

    assert least(max_completion_length=1000) > least()
    run("grpo", "shared", **layered("grpo"), train_dataset=data, memory_budget=least(), steps=1)


def test_the_budget_that_is_named_for_generated_rows_holds_them(data, monkeypatch):
    """Whether or not they have one prompt. Which of the two needs more depends on the lengths."""
    trainer = make_trainer("grpo", "shared", **layered("grpo"), train_dataset=data, memory_budget=8)
    plan, larger = trainer.planner, set()
    for prompt, completion, number in product((1, 40, 200, 600), (30, 100, 500), (2, 8)):
        monkeypatch.setattr(trainer, "longest_prompt", lambda prompt=prompt: prompt)
        trainer.max_completion_length, trainer.args.per_device_train_batch_size = completion, number
        plan.budget = 1
        with pytest.raises(ValueError, match="of `max_completion_length") as error:
            trainer.refuse_small_budget(plan)
        plan.budget = float(re.search(r"at least ([\d.]+), or", str(error.value))[1]) * GIB
        rows = [[0] * prompt + [i + 1] * completion for i in range(number)]
        labels = [[-100] * prompt + row[prompt:] for row in rows]
        least = [plan.least_bytes(FlatBatch.from_rows(rows, labels, prefix_sharing=x)) for x in (False, True)]
        assert max(least) <= plan.budget
        larger.add(least[0] < least[1])
    assert larger == {False, True}


def test_the_memory_that_vllm_leaves_is_not_guessed(data):
    options = {"use_vllm": True, "vllm_mode": "colocate", "memory_budget": "auto"}
    with pytest.raises(ValueError, match="does not know what vLLM leaves"):
        run("grpo", "shared", **layered("grpo"), train_dataset=data, **options)


def test_a_model_that_cannot_recompute_is_refused(monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="`memory_budget=8.0`: LlamaForCausalLM has no layers that can recompute"):
        run("sft", "shared", memory_budget=8)


def test_a_budget_wants_to_see_images():
    without = vision_pairs(12, SEED).filter(lambda row: not row["images"])
    with pytest.raises(ValueError, match="has an image in its column, so what the vision tower keeps"):
        with_images("llava", "dpo", without)


def test_images_are_found_behind_many_examples_without_them():
    data = vision_pairs(12, SEED)
    without = data.filter(lambda row: not row["images"])
    # More than are searched of a stream
    data = concatenate_datasets([without] * (257 // len(without) + 1) + [data])
    assert {"first", "text"} <= set(with_images("llava", "dpo", data).tried_images.names)
    with pytest.raises(ValueError, match="The first examples of the train data have no images"):
        with_images("llava", "dpo", data.to_iterable_dataset(), memory_budget=None)


MASK = {"flat_attention": "mask"}  # with which nothing runs in slices


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("dpo", {"max_tokens_per_micro_batch": 9, **MASK}, "slices: its attention is computed by mask"),
        ("dpo", {"memory_budget": 0.0001, **MASK}, "recomputed, as its attention is"),
        ("grpo", {"max_tokens_per_micro_batch": 5, **MASK}, "=5` is less than a prompt of"),
        (
            "distillation",
            {"memory_budget": 0.0001},
            r"a micro-batch of 4 rows, each a prompt of \d+ tokens with .* need",
        ),
        ("sft", {"max_tokens_per_micro_batch": 200, "ddp_static_graph": True}, "expects one backward pass per micro-"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_training(task, options, message):
    with pytest.raises(ValueError, match=message):
        build(task, **options)
