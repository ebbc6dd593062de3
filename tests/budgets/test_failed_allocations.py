"""An allocation that fails costs a warning and nothing else."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.memory import budgeted, fail_once_planned, failing, in_tokens, layered
from tests.helpers.tiny import SEED, conversations, lora, preference_data, score
from tests.runs import TOLERANCE, assert_same, run, train
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets import attempts
from trl_paddingfree.budgets.attempts import Attempt, halve
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.recomputable import recomputable_layers, recompute_first

WHERE = pytest.mark.parametrize("where", ["forward", "backward"])


@pytest.mark.drawn(3)
@WHERE
@pytest.mark.parametrize("split", [False, True], ids=["whole", "in parts"])
def test_a_failed_allocation_costs_a_warning_and_nothing_else(folder, where, split, caplog):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "max_steps": 2}
    data = preference_data(48, SEED)

    def make(**budget):
        return budgeted("dpo", folder, data, peft_config=lora(), **options, **budget)

    plain = train(make(memory_budget=None))
    trainer = make()
    if split:
        in_tokens(trainer.planner, 200)
    # In the second micro-batch, when there are gradients already
    with failing(trainer, {1}, where == "backward"):
        result = train(trainer)
    assert caplog.text.count("An allocation failed") == 1
    assert_same(plain, result, tolerance=TOLERANCE, ignored=())


def test_a_micro_batch_is_not_computed_again_whose_gradients_a_hook_has_taken(folder):
    """As in a loop that steps the optimizer within the backward pass: weights would be stepped twice."""
    trainer = budgeted("sft", folder, conversations(16, SEED), steps=1)

    def take(parameter):
        parameter.grad = None

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    with (
        failing(trainer, {0}, in_backward=True),
        pytest.raises(torch.OutOfMemoryError, match="A hook of yours gets gradients as soon as"),
    ):
        trainer.train()


@WHERE
def test_a_failed_allocation_generates_nothing_again(data, where, monkeypatch, caplog):
    options = {"gradient_accumulation_steps": 2, "use_adaptive_entropy": True, "entropy_target": 4.0}
    options["train_dataset"] = data
    expected = run("grpo", "shared", **layered("grpo"), **options)
    # In the second micro-batch, when there are gradients already; or in the third, for which rows have been generated
    fail_once_planned(monkeypatch, {1} if where == "backward" else {2}, where == "backward")
    generated = []

    def counted(completions, **_):
        generated.append(1)
        return score(completions)

    counted.__name__ = score.__name__
    result = run("grpo", "shared", **{**layered("grpo"), "reward_funcs": counted}, **options, memory_budget=8)
    assert caplog.text.count("An allocation failed") == 1
    assert len(generated) == 2  # nothing is generated again
    assert_same(expected, result)


@pytest.mark.parametrize("loss_type", ["sigmoid", "aot"], ids=["above the loss", "beneath it"])
@pytest.mark.parametrize("limit", [{}, {"memory_budget": None, "max_tokens_per_micro_batch": 300}])
def test_an_allocation_that_always_fails_ends_the_run(folder, loss_type, limit, passes):
    trainer = budgeted("dpo", folder, preference_data(16, SEED), loss_type=loss_type, **limit)
    with failing(trainer, range(1000), False), pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        trainer.train()
    # Each attempt is another, in slices of fewer tokens than the one before
    tried = [each for each in passes if each.trains]
    sizes = [each.schedule.largest_slice(each.batch.counts.computed) for each in tried]
    assert sorted(set(sizes), reverse=True) == sizes
    assert {each.schedule.kept_slices for each in tried[1:]} == {1}  # after a failure, nothing is to spare
    # Who trains the model next decides for himself which layers recompute
    layers = trainer.planner.layers
    recompute_first(layers, 0)
    trainer.flat_base(trainer.model)(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    assert not any(layer.gradient_checkpointing for layer in layers)


@contextmanager
def outputs_of_first_layer(trainer):
    """Within this context, without the garbage collector, which knows nothing of a device's memory. Yields a list of
    references to the outputs that have gradients."""
    outputs = []

    def watch(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and hidden.requires_grad:
            outputs.append(weakref.ref(hidden))

    gc.disable()
    with recomputable_layers(trainer.flat_base(trainer.model))[0].register_forward_hook(watch):
        try:
            yield outputs
        finally:
            gc.enable()


@WHERE
@pytest.mark.parametrize("attempts", [{0}, range(1000)], ids=["once", "always"])
def test_a_failed_pass_frees_its_memory_at_once(folder, where, attempts, monkeypatch):
    trainer, undo, held = budgeted("dpo", folder, preference_data(16, SEED)), Attempt.undo, []

    def note(attempt):
        held.extend(each() is not None for each in outputs)
        undo(attempt)

    monkeypatch.setattr(Attempt, "undo", note)
    with outputs_of_first_layer(trainer) as outputs, failing(trainer, attempts, where == "backward"):
        try:
            train(trainer)
        except torch.OutOfMemoryError:
            assert attempts != {0}
        held.extend(each() is not None for each in outputs)
    assert held
    assert not any(held)


def test_a_pass_that_is_computed_again_has_a_peak_of_its_own(folder):
    """That of the failed attempt would correct what smaller slices are predicted to need."""
    trainer, begun = budgeted("dpo", folder, preference_data(16, SEED)), []
    memory = SimpleNamespace(can_reset=True, peak=0, begin=lambda: begun.append(1) or 0)
    trainer.planner.device_memory = memory
    with failing(trainer, {1}, True):
        train(trainer)
    assert len(begun) == trainer.state.max_steps + 1


def test_other_processes_wait_so_nothing_is_computed_again(folder, monkeypatch):
    trainer = budgeted("dpo", folder, preference_data(16, SEED))
    monkeypatch.setattr(attempts, "why_not_again", lambda plan: "Lower `memory_budget`")
    with failing(trainer, {0}, False), pytest.raises(torch.OutOfMemoryError, match="on purpose\nLower `memory_budget`"):
        trainer.train()


def test_a_pass_of_reentrant_checkpoints_is_not_computed_again(folder):
    kwargs = {"use_reentrant": True}
    trainer = budgeted("dpo", folder, preference_data(16, SEED), gradient_checkpointing_kwargs=kwargs)
    with failing(trainer, {0}, True), pytest.raises(torch.OutOfMemoryError, match="Set it to `False`, or lower"):
        trainer.train()


def test_gradients_that_are_computed_again_are_dropped_as_they_come():
    gc.collect()  # an error of a test before may keep a checkpoint open, which would take what is saved here
    layer, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    scale = torch.nn.Parameter(torch.ones(()))  # of the loss: only the optimizer knows it
    trained = [*layer.parameters(), scale]
    (layer(x) * scale).sum().backward()
    device, runtime = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(counts=SimpleNamespace(new=[]))
    trainer = SimpleNamespace(model=layer, accelerator=device, runtime=runtime, changed_by_loss=())
    trainer.optimizer = torch.optim.SGD([scale])
    trainer._metrics, trainer._total_train_tokens = {"train": {}}, 0
    attempt = Attempt(trainer)
    (layer(x) * scale).sum().backward()
    whole = [p.grad.clone() for p in trained]
    attempt.undo()
    (layer(x) * scale).sum().backward()
    assert all(p.grad is None for p in trained)
    attempt.finish()
    (layer(x) * scale).mul(0).sum().backward()  # nothing is dropped any more
    assert all(torch.equal(p.grad, grad) for p, grad in zip(trained, whole, strict=True))


@WHERE
def test_a_pass_that_fails_twice_counts_once(folder, where, passes, caplog):
    options = {"per_device_train_batch_size": 8, "steps": 1, "peft_config": lora()}
    data = preference_data(16, SEED)
    plain = train(budgeted("dpo", folder, data, memory_budget=None, **options))
    trainer = budgeted("dpo", folder, data, memory_budget=None, max_tokens_per_micro_batch=10**6, **options)
    with failing(trainer, {0, 1}, where == "backward"):
        result = train(trainer)
    assert caplog.text.count("An allocation failed") == 2
    assert_same(plain, result)
    assert result.trainer.total_counts().real == plain.trainer.total_counts().real


def test_a_pass_that_fails_for_good_leaves_no_hooks(folder, passes):
    trainer = budgeted("dpo", folder, preference_data(16, SEED), loss_type="aot")
    with failing(trainer, range(1000), True), pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        trainer.train()
    model = trainer.flat_base(trainer.model)
    model(input_ids=torch.tensor([[5, 6]]), use_cache=False).logits.sum().backward()
    assert any(p.grad is not None for p in model.parameters())


def test_an_image_block_that_cannot_be_cut_ends_the_halving(folder, passes):
    plan = budgeted("dpo", folder, preference_data(16, SEED), memory_budget=None, max_tokens_per_micro_batch=400)
    plan = plan.planner
    batch = FlatBatch.from_rows([[5] * 60], [[5] * 60])
    blocks = np.where(np.arange(60) < 50, 0, -1)
    batch = replace(batch, layout=FlatLayout.from_segments(batch.layout.segments, blocks))

    def fail():
        plan.current = replace(batch, schedule=plan.own_schedule(batch))
        return halve(plan, torch.OutOfMemoryError("on purpose"))

    assert not all(fail() for _ in range(9))
    assert max(np.diff(plan.own_schedule(batch).cuts), default=60) >= 50
