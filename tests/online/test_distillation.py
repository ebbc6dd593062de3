"""Distillation, padded TRL beside ours: student and teacher compute one flat batch of the generated rows."""

import pytest
import torch

from tests.helpers.memory import CAUTIOUS, fail_once_planned
from tests.helpers.tiny import SEED, arguments, lora, make_model, prompts
from tests.runs import TOLERANCE, assert_same, compare, make_trainer, run
from trl_paddingfree import FlatBatch, FlatModel, PaddingFreeDistillationTrainer
from trl_paddingfree.budgets.features import memory_features
from trl_paddingfree.budgets.needs import MemoryNeeds
from trl_paddingfree.budgets.saved_bytes import SavedBytes
from trl_paddingfree.core.check import gradients as check_gradients

LAYERS = 3


@pytest.fixture(scope="module")
def data():
    """Prompts of very different lengths; those of a pair have one prompt, and meet or not as TRL shuffles them."""
    return prompts(8, SEED).select([i for i in range(8) for _ in range(2)])


def plain(teacher=None, **overrides):
    return arguments("distillation", False, make_model(**overrides), make=lambda seed: teacher or make_model(seed=seed))


def with_lora():
    return {**plain(num_hidden_layers=LAYERS), "peft_config": lora(lora_dropout=0.0)}


def test_a_teacher_that_cannot_share_keeps_the_student_from_it(data):
    def make():
        return plain(make_model("mpt", max_seq_len=4096, d_model=32, n_heads=4, n_layers=2, seed=1))

    compare("distillation", make, data, "flat")
    assert not run("distillation", "ours", **make(), train_dataset=data).trainer.runtime.route.prefix_sharing


def test_tokens_that_rows_share_count_once_for_each(data):
    """At next to no temperature the completions of a prompt are one completion."""
    options = {"temperature": 0.01, "shuffle_dataset": False, "beta": 0.0}
    counts = compare("distillation", plain, data, "shared", **options).ours.trainer.total_counts()
    assert counts.computed < 0.8 * counts.real


def test_tokens_of_tools_are_computed_and_not_scored(data):
    trainer = run("distillation", "shared", **plain(), train_dataset=data, steps=1).trainer
    prompt, completion = torch.tensor([[5, 6, 7], [0, 6, 7]]), torch.tensor([[8, 9, 10, 11], [12, 13, 0, 0]])
    rows = {"prompt_ids": prompt, "prompt_mask": (prompt > 0).long(), "completion_ids": completion}
    rows |= {"completion_mask": (completion > 0).long(), "tool_mask": torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])}
    for tool_mask in (rows["tool_mask"], torch.zeros_like(completion)):  # none is scored, and gradients are zero
        rows["tool_mask"] = tool_mask
        found = []
        for pads in (True, False):
            trainer.runtime.pads = pads
            trainer.model.zero_grad()
            loss = trainer.compute_loss(trainer.model, {**rows, "num_items_in_batch": torch.tensor(4)})
            loss.backward()
            gradients = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
            found.append([loss.detach(), *gradients])
        torch.testing.assert_close(found[1], found[0], rtol=TOLERANCE, atol=TOLERANCE)


def made(data, make=plain, **options):
    """A trainer that has not trained."""
    return make_trainer("distillation", "ours", **make(), train_dataset=data, **options)


# --- Hidden states, and the check ------------------------------------------------------------------------------------


def test_scored_tokens_of_another_shape_are_refused(data):
    flat, rows = FlatModel.of(made(data).model), [[5, 6, 7], [8, 9]]
    with pytest.raises(ValueError, match=r"`scored` has shape \(2, 3\), and the rows of this batch .* \(2, 2\)"):
        flat.hidden_states(FlatBatch.from_rows(rows, rows), torch.ones(2, 3, dtype=torch.bool))


def test_the_check_differentiates_the_student_only(data, monkeypatch):
    differentiated, watched = [], check_gradients.compared_parameters
    monkeypatch.setattr(check_gradients, "compared_parameters", lambda x: differentiated.append(x) or watched(x))
    trainer = made(data)
    assert {id(model) for model in differentiated} == {id(trainer.flat_base(trainer.model))}
    assert all(p.requires_grad for p in trainer.teacher_model.parameters())  # which does not say that it trains


def test_a_stream_that_only_evaluate_gets_counts_its_last_batch_as_a_full_one_as_in_trl(data):
    stream, losses = data.select(range(4)).to_iterable_dataset(), []
    for way in ("padded", "ours"):
        trainer = make_trainer("distillation", way, **plain(), train_dataset=data, per_device_eval_batch_size=3)
        losses.append(trainer.evaluate(stream)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)


def test_a_teacher_may_be_an_engine_whose_eval_returns_nothing(data, monkeypatch):
    trainer = made(data)
    monkeypatch.setattr(trainer.teacher_model, "eval", lambda: None)  # DeepSpeed's
    trainer.train()


# --- Budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "number"), [(with_lora, 0), (plain, 1), (with_lora, LAYERS)], ids=["lora-0", "full-1", "lora-all"]
)
def test_every_number_of_recomputed_layers_computes_the_same_and_keeps_what_was_predicted(
    data, make, number, monkeypatch
):
    def of_layers():
        return {**make(), "model": make_model(num_hidden_layers=LAYERS)}

    monkeypatch.setattr(MemoryNeeds, "fewest_recomputed", lambda *_: (number, 0))
    expected = run("distillation", "shared", **of_layers(), train_dataset=data, beta=0.5)
    counted, compute = [], PaddingFreeDistillationTrainer._compute_loss

    def counting(trainer, *args):
        """One more pass, which is not trained on."""
        memory = trainer.planner
        if memory is not None and torch.is_grad_enabled():
            counter = SavedBytes(trainer.flat_base(trainer.model), trainer.planner.layers)
            with counter.counting():
                result = compute(trainer, *args)
            inside = sum(counter.total(i) for i in range(number, LAYERS)) + sum(counter.inputs[:number])
            saved = memory.needs.saved(memory_features(memory.current, trainer.runtime.route))[number]
            counted.append((int(saved), inside + counter.total(-1)))
            del result
            trainer.runtime.counts.new = type(trainer.runtime.counts.new)()
        return compute(trainer, *args)

    monkeypatch.setattr(PaddingFreeDistillationTrainer, "_compute_loss", counting)
    result = run("distillation", "shared", **of_layers(), train_dataset=data, beta=0.5, memory_budget=8)
    for name, weight in expected.weights.items():
        assert torch.equal(weight, result.weights[name]), name
    assert len(counted) == 2
    for predicted, kept in counted:
        assert predicted == pytest.approx(kept, rel=CAUTIOUS)


def test_what_a_wide_teacher_keeps_is_counted(data):
    batch = FlatBatch.from_rows([[5] * 40], [[-100] * 20 + [5] * 20])
    saved = []
    for size in (32, 96):
        trainer = made(data, lambda size=size: plain(make_model(seed=1, hidden_size=size)), memory_budget=8)
        needs = trainer.planner.needs
        saved.append(int(needs.saved(memory_features(batch, trainer.runtime.route))[0]) / needs.correction)
    assert saved[1] - saved[0] == pytest.approx(20 * 64 * 4, abs=2)  # of bytes, which are rounded
    # The divergence gets all scored tokens at once, however small the slices are
    assert needs.head.working(5000, at_once=128) == needs.head.working(5000) > needs.head.working(128)


def test_a_failed_allocation_costs_a_warning_and_nothing_else(data, monkeypatch, caplog):
    """Nothing is generated again, and the teacher computes as many rows at a time as the student."""
    options = {"gradient_accumulation_steps": 2, "beta": 0.5}
    expected = run("distillation", "shared", **plain(), train_dataset=data, **options)
    fail_once_planned(monkeypatch, {2}, in_backward=False)
    result = run("distillation", "shared", **plain(), train_dataset=data, memory_budget=8, **options)
    assert caplog.text.count("An allocation failed") == 1
    assert_same(expected, result)
