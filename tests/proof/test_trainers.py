"""Trainers look at batches that they train on: the same bits as without, and an error at the first mistake."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.tiny import DATA, arguments, following_rotary, make_model, preference_data
from tests.runs import TOLERANCE, make_trainer, train
from trl_paddingfree import FlatBatch, FlatModel, PaddingFreeDPOConfig, PaddingFreeSFTTrainer, UnprovenModelError
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.proof.certificate import Certificate
from trl_paddingfree.proof.look import Rows, look
from trl_paddingfree.registry import TRAINERS


def trained(task, check_steps, **given):
    """A run that looks every so many steps."""
    data = {} if "train_dataset" in given else {"train_dataset": DATA[task](16, 1)}
    return train(make_trainer(task, "shared", check_steps=check_steps, logging_steps=1, **data, **given))


def assert_same_bits(without, looked):
    """The same weights, losses and norms, bit for bit."""
    assert all(torch.equal(x, looked.weights[name]) for name, x in without.weights.items())
    for one, other in zip(without.log_history, looked.log_history, strict=True):
        measured = ("time", "second", "memory")
        names = [name for name in one if not any(part in name for part in measured)]
        assert [one[name] for name in names] == [other[name] for name in names]


def assert_looked(run, times):
    looks = run.trainer._looks.found
    assert looks.number == times
    assert looks.rows >= times
    assert looks.largest_error < TOLERANCE
    assert looks.not_compared == []


# How often each looks in two steps: a loss may call the model without gradients, too, or a reference
LOOKS = {"dpo": 4, "sft": 2, "reward": 2, "kto": 4, "grpo": 2, "rloo": 4, "distillation": 4}


@pytest.mark.parametrize("task", TRAINERS)
def test_looks_leave_no_trace_in_training(task):
    without, looked = (trained(task, every, steps=2) for every in (0, 1))
    assert_same_bits(without, looked)
    assert_looked(looked, LOOKS[task])


@pytest.mark.parametrize(
    ("task", "given"),
    [
        ("sft", {"model": {"attention_dropout": 0.3}}),
        ("sft", {"neftune_noise_alpha": 5.0}),
        ("sft", {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
        ("sft", {"max_tokens_per_micro_batch": 24}),
        ("dpo", {"max_tokens_per_micro_batch": 40}),
        ("dpo", {"max_tokens_per_micro_batch": 30, "loss_type": "aot"}),
        ("dpo", {"memory_budget": 1.0}),
        ("dpo", {"pad_to_multiple_of": 16}),
        ("grpo", {"max_tokens_per_micro_batch": 60}),
    ],
    ids=str,
)
def test_looks_leave_no_trace_whatever_the_options(task, given):
    def fresh():
        options = dict(given)
        if "model" in options:
            options.update(arguments(task, model=make_model(**options.pop("model")), adapters=False))
        return options

    without, looked = (trained(task, every, steps=2, **fresh()) for every in (0, 1))
    assert_same_bits(without, looked)
    looks = looked.trainer._looks.found
    assert looks.number
    assert looks.largest_error < TOLERANCE
    assert all("in slices" in reason for reason in looks.not_compared)


def test_rows_of_one_token_have_no_answers():
    data = Dataset.from_list([{"input_ids": [i]} for i in range(5, 13)])
    run = trained("sft", 1, steps=1, train_dataset=data, **arguments("sft", adapters=False))
    assert run.trainer._looks.found.not_compared == []


def test_it_looks_at_the_first_micro_batch_and_every_so_many_steps():
    run = trained("sft", 2, steps=5)
    assert_looked(run, 3)
    errors = [entry.get("flat/check_error") for entry in run.log_history if "loss" in entry]
    assert [error is not None for error in errors] == [True, False, True, False, True]


def leaky_above(model, tokens):
    """Flat rows of more `tokens` have each token see a little of the one before it, in training with gradients."""
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward

    def wrong(states):
        found = forward(states)
        if states.size(0) > 1 or states.size(1) <= tokens or not states.requires_grad:
            return found
        return found + 1e-3 * found.roll(1, 1)

    mlp.forward = wrong
    return model


@pytest.mark.parametrize("task", ["dpo", "sft", "grpo"])
def test_a_mistake_ends_training_before_anything_is_learnt_of_it(task, tmp_path):
    given = {**arguments(task, adapters=False), "train_dataset": DATA[task](16, 1)}
    trainer = make_trainer(task, "shared", steps=2, check_steps=1, output_dir=str(tmp_path), **given)
    leaky_above(trainer.model, 40)  # after the start-up check
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    with pytest.raises(
        UnprovenModelError, match=r"before step 1, of \d+ rows and \d+ tokens, with segment.*gradient"
    ) as e:
        trainer.train()
    assert "`padding_free=False`" in str(e.value)
    assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in trainer.model.parameters())


def flat_rows(**options):
    """Padded rows, their flat batch, and a model that computes it."""
    model = with_head(make_model(**options)).train()
    FlatModel.install(model, choose_route(model))
    ids = torch.randint(5, 60, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([12, 9, 11, 5, 12, 7])[:, None]).long()
    rows = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    batch = FlatBatch.from_padded(rows["input_ids"], mask, rows["labels"])
    return {**rows, "fused_lm_head": True}, batch, model


def test_a_student_generates_after_a_mistake_has_ended_its_training():
    """TRL puts its loss in the place of the student's forward for the time of a call."""
    data = {"train_dataset": DATA["distillation"](16, 1)}
    trainer = make_trainer("distillation", "shared", check_steps=1, **arguments("distillation", adapters=False), **data)
    model, forward = trainer.model, trainer.model.forward
    leaky_above(model, 40)
    with pytest.raises(UnprovenModelError):
        trainer.train()
    assert model.forward == forward
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape[1] > 3


def test_looks_may_be_switched_off_between_two_runs():
    trainer = trained("sft", 1, steps=2).trainer
    trainer.args.check_steps = 0
    trainer.train()
    assert trainer._looks.found.number == 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_mistake_ends_training_though_a_step_catches_its_error(accumulation):
    """As guards do that skip what fails: neither the micro-batches after it nor later steps are learnt from."""

    class Guarded(PaddingFreeSFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            try:
                return super().training_step(model, inputs, num_items_in_batch)
            except Exception:
                return torch.zeros(())

    given = {**arguments("sft", adapters=False), "train_dataset": DATA["sft"](16, 1), "trainer_class": Guarded}
    options = {"steps": 3, "check_steps": 250, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer("sft", "shared", **given, **options)
    leaky_above(trainer.model, 40)
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    for _ in range(2):  # a new run looks anew
        with pytest.raises(UnprovenModelError, match="before step 1, of"):
            trainer.train()
        assert all(torch.equal(x, before[name]) for name, x in trainer.model.state_dict().items())


def test_a_mistake_in_few_scored_answers_is_not_diluted_by_the_other_columns():
    """Of a pass without gradients, where answers are all there is to see."""
    given = arguments("dpo", model=make_model(dtype=torch.bfloat16), adapters=True)
    words = [" ".join(f"w{i % 50}" for i in range(start, start + 400)) for start in range(4)]
    rows = [{"prompt": text, "chosen": " w1 w2 w3", "rejected": " w4 w5 w6"} for text in words]
    trainer = make_trainer("dpo", "shared", steps=1, check_steps=1, train_dataset=Dataset.from_list(rows), **given)
    norm = trainer.model.base_model.model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * (1.04 if not torch.is_grad_enabled() and x.size(1) > 450 else 1)
    with pytest.raises(UnprovenModelError, match="answers to row"):
        trainer.train()


def test_rounding_that_follows_the_size_of_matrices_is_no_mistake():
    """As of kernels on accelerators, which round alike for matrices of like size: single rows, wider or not."""
    given = arguments("sft", model=make_model(dtype=torch.bfloat16), adapters=False)
    data = DATA["sft"](16, 1)
    for sizes in (True, False):
        trainer = make_trainer("sft", "flat", steps=1, check_steps=1, train_dataset=data, **given)
        mlp = trainer.model.base_model.layers[0].mlp

        def rounding(states, forward=mlp.forward, sizes=sizes):
            tokens = states.size(0) * states.size(1) if sizes else (states.size(0) == 1) * states.size(1)
            return forward(states) * ((1.08 if sizes else 1.3) if tokens > 40 else 1)

        mlp.forward = rounding
        with nullcontext() if sizes else pytest.raises(UnprovenModelError):
            trainer.train()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_of_a_flat_batch_that_are_not_finite_in_float16(value):
    """What a smaller scale mends has overflown, and is named. What it does not is a mistake."""
    rows, batch, model = flat_rows(dtype=torch.float16)
    hidden = model.base_model.layers[0].mlp
    forward = hidden.forward

    def wrong(states):
        found = forward(states)
        if states.size(0) == 1 and states.size(1) > 20 and found.requires_grad:
            least = 0 if math.isnan(value) else 1  # above which it does not fit
            found.register_hook(lambda x: x.masked_fill(x.abs() > least, value))
        return found

    hidden.forward = wrong
    looked = look(Rows(FlatModel.of(model), model, rows, batch))
    assert looked.agreed == (not math.isnan(value))
    if looked.agreed:
        assert "too large for float16" in str(looked.verdict)
    else:
        assert "not finite" in looked.verdict.failure


def test_other_tokens_are_tried_in_the_same_rows():
    """In float32, half of the rows is scored: what is off in one of them has to recur there."""
    rows, batch, model = flat_rows()
    for seed in range(8):
        first = Rows(FlatModel.of(model), model, rows, batch, seed=seed)
        assert all(first.with_other_tokens(draw).halves == first.halves for draw in (1, 2))


def test_mismatched_rows_of_kto_are_compared():
    trainer = make_trainer(
        "kto", "shared", steps=1, check_steps=1, train_dataset=DATA["kto"](16, 1), **arguments("kto", adapters=False)
    )
    mlp = trainer.model.base_model.layers[0].mlp
    forward = mlp.forward

    def wrong(states):  # in the pass without gradients, which these rows have
        is_flat = states.size(0) == 1 and states.size(1) > 40 and not torch.is_grad_enabled()
        return forward(states) * (1.01 if is_flat else 1)

    mlp.forward = wrong
    with pytest.raises(UnprovenModelError, match="answers to row"):
        trainer.train()


def test_the_state_and_the_card_say_what_was_compared(tmp_path):
    run = trained("dpo", 1, steps=2, output_dir=str(tmp_path), save_strategy="steps", save_steps=2)
    looks = run.trainer._looks.found
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    found = state["stateful_callbacks"]["Looks"]["attributes"]
    assert found == asdict(looks)
    assert found["number"] == 4
    assert found["tokens"] > 100
    run.trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert f"4 of its batches ({looks.rows:,} rows, {looks.tokens:,} tokens) were computed row by row" in card
    resumed = make_trainer("dpo", "shared", steps=3, check_steps=1, output_dir=str(tmp_path), **arguments("dpo"))
    resumed.train(resume_from_checkpoint=True)
    assert resumed._looks.found.number == 6


class Patience(TrainerCallback, ExportableState):
    """A callback that transformers saves with checkpoints."""

    def __init__(self, steps=0):
        self.steps = steps

    def state(self):
        return {"args": {"steps": self.steps}, "attributes": {}}


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("before", [0, 1])
def test_runs_are_resumed_with_looks_and_without_and_their_other_callbacks_restored(tmp_path, before, restores):
    """Checkpoints of runs without looks, also those of padded TRL, know of none."""
    given = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, **arguments("dpo")}
    first = make_trainer("dpo", "shared", steps=1, check_steps=before, callbacks=[Patience(7)], **given)
    first.train()
    for steps, every in enumerate([1, 0, 1], 2):
        given["restore_callback_states_from_checkpoint"] = restores
        trainer = make_trainer("dpo", "shared", steps=steps, check_steps=every, callbacks=[Patience(3)], **given)
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == steps
        (own,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Patience))
        assert own.steps == (7 if restores else 3)
        if every:
            assert trainer._looks in trainer.callback_handler.callbacks
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Looks"]["attributes"] == asdict(trainer._looks.found)
    assert trainer._looks.found.number == 2 * (2 + before)


def test_a_certificate_of_another_release_is_read():
    found = asdict(Certificate(number=3, rows=5))
    assert Certificate.of({"of_a_later_release": 1, **found}) == Certificate(number=3, rows=5)
    del found["doubts"]
    assert Certificate.of(found) == Certificate(number=3, rows=5)


def test_a_step_that_is_tried_again_with_smaller_batches_is_looked_at_again_and_no_hook_stays():
    given = {**arguments("dpo"), "auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer = make_trainer("dpo", "shared", steps=2, check_steps=2, train_dataset=DATA["dpo"](16, 1), **given)
    step, failed = trainer.training_step, []

    def fail_once(*args, **kwargs):
        loss = step(*args, **kwargs)
        if not failed:
            failed.append(loss)
            raise RuntimeError("CUDA out of memory.")
        return loss

    trainer.training_step = fail_once
    trainer.train()
    assert trainer.state.train_batch_size < 4
    assert trainer._looks.found.number == 2 * 2  # of the step that failed, and of the first one
    assert not any(module._forward_pre_hooks for module in (trainer.model, trainer.model_wrapped))


def test_a_batch_that_cannot_be_computed_again_is_no_mistake_and_named(monkeypatch, caplog):
    """Beside what is compared, there may be no memory for it."""
    flat, passes = Rows.flat, []

    def fail_again(rows):
        passes.append(rows)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("on purpose")
        found = flat(rows)
        return found._replace(answers=found.answers * 1.01) if len(passes) == 1 else found

    monkeypatch.setattr(Rows, "flat", fail_again)
    run = trained("sft", 1, steps=2)
    said = "some batches were not compared, because the flat batch could not be computed again (OutOfMemoryError: on"
    assert [reason.startswith(said) for reason in run.trainer._looks.found.not_compared] == [True]
    assert "could not be computed again" in caplog.text
    assert run.trainer._looks.found.number == 1


def test_without_looks_nothing_is_added(tmp_path):
    run = trained("dpo", 0, steps=2, output_dir=str(tmp_path))
    assert run.trainer._looks is None
    assert not any("flat/check_error" in entry for entry in run.log_history)
    run.trainer.create_model_card()
    assert "row by row" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("value", [-1, True, 0.5, "10"])
def test_other_values_are_refused(value, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"`check_steps={value!r}`")):
        PaddingFreeDPOConfig(str(tmp_path), check_steps=value, bf16=False)
    assert not any(Path(tmp_path).iterdir())


def scaled_above(model, tokens, factor):
    """Layers of flat rows of more `tokens` are off by a `factor`: a size that is wrong, and no leak."""
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * (factor if x.size(0) == 1 and x.size(1) > tokens else 1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_size_that_is_off_with_other_tokens_too_is_a_mistake(dtype):
    given = arguments("sft", model=make_model(dtype=dtype), adapters=False)
    trainer = make_trainer("sft", "shared", steps=4, check_steps=1, train_dataset=DATA["sft"](16, 1), **given)
    scaled_above(trainer.model, 40, 2)
    with pytest.raises(UnprovenModelError, match="before step 1, of"):
        trainer.train()


def once(tokens, tried):
    """The first of a look's tries is off, in all rows."""
    return slice(None) if tried == 0 else slice(0)


def elsewhere(tokens, tried):
    """Each of three tries is off in another row."""
    start = (0, tokens // 2, tokens - 5)[tried]
    return slice(start, start + 5)


@pytest.mark.parametrize(("where", "times"), [(once, 2), (elsewhere, 3)])
def test_a_size_that_is_off_with_some_tokens_only_is_rounding_in_low_precision(where, times, caplog):
    """As if rounding sent one of them to another expert: said, and counted."""
    given = arguments("sft", model=make_model(dtype=torch.bfloat16), adapters=False)
    trainer = make_trainer("sft", "shared", steps=1, check_steps=1, train_dataset=DATA["sft"](16, 1), **given)
    mlp = trainer.model.base_model.layers[0].mlp
    forward, tries = mlp.forward, []

    def wrong(states):
        found = forward(states)
        if states.size(0) > 1 or states.size(1) <= 40:
            return found
        if not any(torch.equal(states, each) for each in tries):
            tries.append(states.detach().clone())
        tried = next(i for i, each in enumerate(tries) if torch.equal(states, each))
        factors = torch.ones(states.size(1), 1)
        factors[where(states.size(1), tried)] = 2
        return found * factors.to(found)

    mlp.forward = wrong
    trainer.train()
    assert trainer._looks.found.doubts == 1
    assert len(tries) == times
    assert "of their size, but not with other tokens in the same places" in caplog.text
    assert "In 1 of them, more differed" in str(trainer._looks.found)


def test_mixed_precision_rounds_as_its_dtype(monkeypatch):
    """Weights are in float32: what bfloat16 may be off by, measured or not, is a mistake without it."""
    monkeypatch.setattr("trl_paddingfree.proof.look._WIDER", ())
    for bf16 in (False, True):
        options = {"steps": 1, "check_steps": 1, "train_dataset": DATA["sft"](16, 1), "bf16": bf16}
        trainer = make_trainer("sft", "shared", **options, **arguments("sft", adapters=False))
        scaled_above(trainer.model, 40, 1.004)
        with nullcontext() if bf16 else pytest.raises(UnprovenModelError):
            trainer.train()


def test_positions_that_count_padding_on_the_left_do_so_in_single_rows():
    """By a collator of the user's, for a model that counts columns."""
    model = tiny_model("gpt2")
    rows = [{"input_ids": [0] * pad + [*range(5, 20 - pad)], "pad": pad} for pad in (0, 3, 6, 1)]

    def collate(examples):
        ids = torch.tensor([row["input_ids"] for row in examples])
        mask = (ids > 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.cumsum(1) < 2, -100)}

    options = {"data_collator": collate, "train_dataset": Dataset.from_list(rows), "remove_unused_columns": False}
    assert_looked(trained("sft", 1, steps=2, **options, **arguments("sft", model=model, adapters=False)), 2)


def failing(model, fails):
    """Calls of the model fail whose layers get states of a certain shape."""
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward

    def checked(states):
        if fails(*states.shape[:2]):
            raise RuntimeError("out of memory,\nand much more")
        return forward(states)

    mlp.forward = checked


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_rows_that_cannot_be_computed_alone_are_left_out_and_named(task, tmp_path, caplog):
    data = {"train_dataset": DATA[task](16, 1), "output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    options = {"steps": 1, "check_steps": 1, "train_sampling_strategy": "sequential", **data}
    trainer = make_trainer(task, "flat", **options, **arguments(task, adapters=False))
    longest = next(iter(trainer.get_train_dataloader()))["attention_mask"].sum(1).max()
    failing(trainer.model, lambda rows, length: rows == 1 and length == longest)
    trainer.train()
    found = trainer._looks.found
    reason = "rows could not be computed alone (RuntimeError: out of memory,)"
    assert found.not_compared == [reason]
    assert found.left_out >= 1
    assert found.rows
    assert re.search(
        r"before step 1, rows? [\d, ]+ (was|were) not computed alone \(RuntimeError: out of memory,\)", caplog.text
    )
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Looks"]["attributes"]["not_compared"] == [reason]
    trainer.create_model_card()
    assert f"{found.left_out} rows were left out. Not compared: {reason}." in (tmp_path / "README.md").read_text()


def test_training_goes_on_if_no_row_can_be_computed_alone_and_says_so(tmp_path, caplog):
    data = {"train_dataset": DATA["sft"](16, 1), "output_dir": str(tmp_path)}
    trainer = make_trainer("sft", "flat", steps=1, check_steps=1, **data, **arguments("sft", adapters=False))
    failing(trainer.model, lambda rows, length: rows == 1 and length < 40)
    trainer.train()
    assert trainer._looks.found.number == 0
    assert "no row could be computed alone" in caplog.text
    assert not any("flat/check_error" in entry for entry in trainer.state.log_history)
    trainer.create_model_card()
    assert "none of its batches could be compared with its rows" in (tmp_path / "README.md").read_text()


def test_rows_that_padding_makes_fail_measure_no_rounding():
    """Rows of all positions that a table has: rounding is measured where they fit, and nothing is said of them."""
    given = arguments("sft", model=make_model(dtype=torch.bfloat16), adapters=False)
    trainer = make_trainer("sft", "flat", steps=1, check_steps=1, train_dataset=DATA["sft"](16, 1), **given)
    longest = next(iter(trainer.get_train_dataloader()))["attention_mask"].sum(1).max()
    failing(trainer.model, lambda rows, length: rows == 1 and longest < length < longest + 9)
    scaled_above(trainer.model, 40, 2)
    with pytest.raises(UnprovenModelError, match="before step 1, of"):
        trainer.train()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_rotary_frequencies_that_follow_the_longest_row_follow_it_in_single_rows(kind, task):
    given = arguments(task, model=make_model(**following_rotary(24, kind)), adapters=False)
    assert_looked(trained(task, 1, steps=2, **given), LOOKS[task])


@pytest.mark.parametrize("max_length", [4, 30])
def test_rows_without_anything_to_score_have_no_gradient(max_length):
    """Long prompts that `max_length` cuts before their completions."""
    options = {"train_dataset": preference_data(16, 1, conversational=False), "max_length": max_length}
    run = trained("dpo", 1, steps=2, truncation_mode="keep_start", **options, **arguments("dpo", adapters=False))
    assert_looked(run, LOOKS["dpo"])
