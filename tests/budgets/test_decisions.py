"""Which layers a memory budget has recompute changes no figure, whatever it decides."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers.memory import KINDS, LAYERS, budgeted, byte_per_token, layered, most_slices, ready, with_images
from tests.helpers.tiny import DATA, REENTRANT, SEED, conversations, lora, preference_data
from tests.helpers.vision import vision_pairs
from tests.runs import ROUNDED, assert_same, run
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.planner import MemoryPlanner
from trl_paddingfree.core.device import GIB
from trl_paddingfree.core.flat.schedule import Schedule


def step(trainer, batch, number=None):
    """Loss and gradients of one training step, with dropout from the same state."""
    if number is not None:
        trainer.planner.own_schedule = lambda _: Schedule(recompute=number)
    torch.manual_seed(SEED)
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(50))
    return [loss, *(p.grad for p in trainer.model.parameters() if p.requires_grad)]


def logged(result, name):
    """A figure of each step of a run."""
    return [entry[f"flat/{name}"] for entry in result.log_history if "loss" in entry]


def between(trainer, number):
    """A budget in GiB with which the largest micro-batch of a run recomputes `number` layers."""
    planner = trainer.planner
    batches = [batch["flat_batch"] for batch in trainer.get_train_dataloader()]
    peaks = map(planner.needs.peaks, map(planner.features, batches))
    return max(int(peak[number]) for peak in peaks) / GIB


@pytest.mark.drawn(2)
@REENTRANT
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_every_number_of_recomputed_layers_computes_the_same(folder, task, reentrant):
    data = preference_data(8, SEED) if task == "dpo" else conversations(8, SEED)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    kwargs = {"peft_config": lora(lora_dropout=0.3)} if task == "dpo" else {}
    plain = ready(budgeted(task, folder, data, memory_budget=None, **kwargs))
    trainer = ready(budgeted(task, folder, data, **options, **kwargs))
    batch = next(iter(trainer.get_train_dataloader()))
    expected = step(plain, {name: value for name, value in batch.items() if name != "rows"})
    calls, recomputations = [], []
    for layer in trainer.planner.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for number in range(LAYERS + 1):
        calls.clear()
        actual = step(trainer, batch, number)
        recomputations.append(len(calls))
        assert all(map(torch.equal, expected, actual)), number
    assert np.diff(recomputations).tolist() == [1] * LAYERS


@pytest.mark.parametrize(("task", "reentrant"), [("grpo", False), ("rloo", True)])
def test_every_number_of_recomputed_layers_computes_the_same_of_generated_rows(data, task, reentrant, monkeypatch):
    def make():
        adapters = {"peft_config": lora(lora_dropout=0.3)} if task == "rloo" else {}
        return {**layered(task), **adapters}

    # Four passes that train, each with another number
    options = {"gradient_accumulation_steps": 2, "num_iterations": 2}
    expected = run(task, "shared", **make(), train_dataset=data, **options)
    numbers, schedule = iter(range(LAYERS + 1)), MemoryPlanner.own_schedule

    def scheduled(planner, batch):
        found = schedule(planner, batch)
        return replace(found, recompute=next(numbers)) if torch.is_grad_enabled() else found

    monkeypatch.setattr(MemoryPlanner, "own_schedule", scheduled)
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    result = run(task, "shared", **make(), train_dataset=data, memory_budget=8, **options, **kwargs)
    assert_same(expected, result, tolerance=0, ignored=())
    assert logged(result, "recomputed") == pytest.approx([(0 + 1) / 2 / LAYERS, (2 + 3) / 2 / LAYERS])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_recomputed_layers_computes_the_same_of_images(kind):
    trainer = ready(with_images(kind, "dpo", vision_pairs(8, SEED), lora=True))
    batch, layers = next(iter(trainer.get_train_dataloader())), trainer.planner.layers
    assert len(layers) == {"llava": 3, "qwen2_5_vl": 4}[kind]  # LLaVA leaves out what the last of the tower gives
    expected = step(trainer, batch, 0)
    for number in range(1, len(layers) + 1):
        for one, other in zip(expected, step(trainer, batch, number), strict=True):
            assert one is other is None or torch.equal(one, other), number


def test_a_budget_recomputes_only_what_it_must_and_splits_what_does_not_fit(folder):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps": 2}
    common = {"model": folder, "train_dataset": preference_data(32, SEED)}
    plain = run("dpo", "ours", **common, **options)
    whole = run("dpo", "ours", **common, **options, memory_budget=8)
    assert_same(plain, whole, tolerance=0, ignored=())
    assert set(logged(whole, "recomputed")) == {0.0}
    some = run("dpo", "ours", **common, **options, memory_budget=between(whole.trainer, 2))
    assert_same(plain, some, tolerance=0, ignored=())
    shares = logged(some, "recomputed")
    assert 0 < sum(shares) < len(shares)
    fixed = whole.trainer.planner.needs.fixed / GIB
    least = fixed + (between(whole.trainer, LAYERS) - fixed) / 2
    parts = run("dpo", "ours", **common, **options, memory_budget=least)
    assert_same(plain, parts, ignored=())
    budgets = logged(parts, "memory_budget_gib")
    assert budgets == pytest.approx([least] * len(budgets))
    assert (np.array(logged(parts, "predicted_memory_gib")) <= budgets).all()
    assert parts.trainer.total_counts().real == plain.trainer.total_counts().real


@pytest.mark.parametrize("task", ["reward", "kto"])
def test_a_budget_changes_no_figure_of_heads(task, passes, hold_tokens):
    make = partial(layered, task)
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    options["train_dataset"] = DATA[task](32, SEED)
    same = partial(assert_same, ignored=(*ROUNDED, "accuracy"))  # one pair of answers is equal
    padded = run(task, "padded", **make(), **options)
    whole = run(task, "shared", **make(), **options, memory_budget=8)
    same(padded, whole)
    budget = between(whole.trainer, 2)
    some = run(task, "shared", **make(), **options, memory_budget=budget)
    same(padded, some)
    assert sum(logged(some, "recomputed")) > 0
    hold_tokens(100)
    parts = run(task, "shared", **make(), **options, memory_budget=8)
    same(padded, parts)
    assert max(logged(parts, "predicted_memory_gib")) <= 100 / GIB
    # Rewards of pairs add up, and KTO compares all of a micro-batch
    assert (most_slices(passes) > 1) == (task == "kto")


def test_slices_hold_whole_completions_where_small_ones_would_keep_more(folder):
    plan = budgeted("dpo", folder, preference_data(8, SEED)).planner
    # 30 completions after a prompt: 400 keys stay of slices that cut no completion, those of nearly all of others
    prompt = [5] * 400
    rows = [prompt + [6 + i] * 200 for i in range(30)]
    batch = FlatBatch.from_rows(rows, rows)
    plan.needs = byte_per_token(LAYERS, recomputed=1, of_keys=1)
    least = plan.least_bytes(batch)
    assert least < LAYERS * 250 + 2 * 400 < plan._cut(batch, 8).peak
    for plan.budget in (least, 2 * least):
        decision = plan.own_schedule(batch)
        assert decision.cuts
        assert decision.peak <= plan.budget
    plan.budget = least - 1
    with pytest.raises(ValueError, match="in slices"):
        plan.scheduled(batch, trains=True)


def test_as_few_slices_recompute_as_the_budget_asks(folder):
    plan = budgeted("dpo", folder, preference_data(8, SEED)).planner
    plan.needs, plan.limit = byte_per_token(LAYERS, recomputed=1, of_keys=1), 50
    batch = FlatBatch.from_rows([[5] * 400], [[5] * 400])
    for number in range(1, 9):
        plan.budget = 2 * 350 + LAYERS * 50 * number  # the keys of all slices but the last, with their gradients
        schedule = plan.own_schedule(batch)
        assert (schedule.num_slices, schedule.kept_slices, schedule.peak) == (8, number, plan.budget)
        assert plan.least_bytes(batch) <= 2 * 400 + LAYERS * 50


@pytest.mark.parametrize("option", [8, 9])
def test_a_limit_that_was_lowered_is_resumed_with_the_budget(folder, tmp_path, option):
    data = preference_data(8, SEED)
    first = budgeted("dpo", folder, data, memory_budget=8).planner
    first.limit, first.has_shrunk = 77, True
    first.save(tmp_path)
    again = budgeted("dpo", folder, data, memory_budget=option).planner
    again.restore(tmp_path)
    assert (again.limit, again.has_shrunk) == ((77, True) if option == 8 else (None, False))


def test_a_resumed_run_takes_the_same_decisions(folder, tmp_path):
    common = {"model": folder, "train_dataset": preference_data(32, SEED), "memory_budget": "auto"}
    common |= {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "steps": 2}
    first = run("dpo", "ours", **common).trainer
    # As it would be after a failed allocation, and on a GPU
    planner = first.planner
    planner.budget, planner.has_shrunk = 12345678, True
    planner.needs = replace(planner.needs, correction=1.5)
    first._save_checkpoint(first.model, None)
    again = budgeted("dpo", **{**common, "steps": 3})
    again.train(resume_from_checkpoint=True)
    assert (again.planner.budget, again.planner.needs.correction) == (12345678, 1.5)
