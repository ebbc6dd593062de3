"""Every trainer computes on another device what it computes on the CPU, whichever option moves its data."""

import gc
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests import pretend_device
from tests.core.trainers import test_kernels
from tests.device.runs import TOLERANCE, assert_as_on_cpu, train
from tests.helpers import random_runs
from tests.helpers.architectures import tiny_model
from tests.helpers.float64 import float64_throughout
from tests.helpers.memory import most_slices
from tests.helpers.random_draws import draw
from tests.helpers.reference_flash import half_flash_func, reference_flash, varlen_on
from tests.helpers.tiny import ADAPTERS, ATTENTIONS, DATA, SEED, arguments, conversations, lora, make_model
from tests.helpers.vision import (
    VISION_DATA,
    on_images,
    vision_labelled,
    vision_messages,
    vision_pairs,
    vision_prompts,
)
from tests.runs import LAYOUTS, assert_as_close, make_trainer, off_by, run
from tests.runs import TOLERANCE as AS_PADDED
from trl_paddingfree import split_turns
from trl_paddingfree.budgets.planner import CORRECTED, MemoryPlanner
from trl_paddingfree.core.device import GIB
from trl_paddingfree.core.trainers.proving import StartUpCheck
from trl_paddingfree.slices import decoder as slices

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
RECOMPUTED = [
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for reentrant in (False, True)
]


@ADAPTERS
@pytest.mark.parametrize("task", DATA)
def test_a_trainer_computes_what_it_computes_on_the_cpu(task, adapters):
    def make():
        return {**arguments(task, adapters), "eval_dataset": DATA[task](4, SEED + 1)}

    assert_as_on_cpu(lambda: train(task, "shared" if adapters else "flat", make, **EVALUATED, **RECOMPUTED[adapters]))


@pytest.mark.parametrize("backend", ["segment", "mask"])
@ATTENTIONS
def test_every_route(backend, attention):
    def make():
        return arguments("dpo", model=make_model(attn_implementation=attention))

    for layout in LAYOUTS:
        result = assert_as_on_cpu(lambda: train("dpo", layout, make, flat_attention=backend))  # noqa: B023
        assert result.trainer.runtime.route.backend == backend


OPTIONS = {
    "precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "precomputed-kto": ("kto", {"precompute_ref_log_probs": True}),
    "arranged-by-tokens": ("dpo", {"arrange_micro_batches": "tokens"}),
    "arranged-by-prefix": ("grpo", {"arrange_micro_batches": "prefix"}),
    "packed": ("sft", {"packing": True, "max_length": 40}),
    "workers": ("dpo", {"dataloader_num_workers": 2}),
    "reference": ("grpo", {"beta": 0.05, "num_iterations": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_move_data(name):
    task, options = OPTIONS[name]
    assert_as_on_cpu(lambda: train(task, **options))


# --- budgets ----------------------------------------------------------------------------------------------------------

# Where a budget can hold the most demanding example and not a micro-batch, and options: of other losses and so small a
# model, next to all is the head, which sees all rows
HELD = {"dpo": {}, "sft": {}, "reward": {}, "kto": {"loss_type": "apo_zero_unpaired"}}


def tight_budget(task, **options):
    """The least budget in GiB that holds every example, and a twentieth more."""
    trainer = make_trainer(task, "shared", memory_budget=1, **options)
    collator = replace(trainer.data_collator, keeps_rows=True)
    alone = (batch for each in trainer.train_dataset for batch in collator([each])["rows"].alone(collator))
    return 1.05 * max(map(trainer.planner.least_bytes, alone)) / GIB


@pytest.fixture
def slices_made(monkeypatch):
    """In how many parts or slices each micro-batch ran on the device."""
    made, parts, schedule = [], MemoryPlanner.parts, MemoryPlanner.own_schedule

    def watch(count, method):
        def watched(*args):
            found = method(*args)
            if not pretend_device.why_off():
                made.append(count(found))
            return found

        return watched

    monkeypatch.setattr(MemoryPlanner, "parts", watch(len, parts))
    monkeypatch.setattr(MemoryPlanner, "own_schedule", watch(lambda schedule: schedule.num_slices, schedule))
    return made


@pytest.mark.parametrize("task", DATA)
def test_a_token_budget_that_splits(task, slices_made):
    assert_as_on_cpu(lambda: train(task, max_tokens_per_micro_batch=30))
    assert max(slices_made) > 1


@pytest.mark.parametrize("task", HELD)
def test_a_memory_budget_that_splits(task, slices_made):
    data, options = DATA[task](8, 0), HELD[task]
    budget = tight_budget(task, train_dataset=data, **options)
    slices_made.clear()
    result = assert_as_on_cpu(lambda: train(task, train_dataset=data, memory_budget=budget, steps=5, **options))
    assert max(slices_made) > 1
    # Of tiny models, what is not counted is a larger share: rows, and results that kernels write beside their inputs;
    # and of slices of a model without the LM head, what works at a time is less than that of the largest tensor
    assert result.trainer.planner.observed == CORRECTED
    needs = result.trainer.planner.needs
    padding = 1 if task == "reward" else needs.padding  # heads of these small models outweigh what layers pad
    assert (0.4 if task == "reward" else 0.9) < needs.correction / padding < 1.5


def test_looks_correct_no_prediction():
    """References are looked at while the policy's pass is measured."""
    given = {"train_dataset": DATA["dpo"](8, 0), **HELD["dpo"]}
    trained = train("dpo", memory_budget=tight_budget("dpo", **given), steps=5, check_steps=1, **given)
    assert trained.trainer._looks.found.number
    assert trained.trainer.planner.observed == CORRECTED


@pytest.mark.parametrize("task", ["kto", "grpo", "rloo", "distillation"])
def test_a_memory_budget_that_slices(task, passes, hold_tokens):
    hold_tokens(20)
    assert_as_on_cpu(lambda: train(task, train_dataset=DATA[task](8, 0), memory_budget=1, steps=1))
    assert most_slices(passes) > 1


def test_a_memory_budget_counts_what_others_hold():
    """Such as a reward model; what the first run has left is a small part of that."""
    alone = train("dpo", memory_budget=1).trainer.planner.needs.fixed
    held = torch.zeros(2**22, device=pretend_device.DEVICE)
    beside = train("dpo", memory_budget=1).trainer.planner.needs.fixed
    assert beside - alone == pytest.approx(held.nbytes, rel=0.1)


class Crowded(TrainerCallback):
    """Leaves training no more than some bytes of the device's memory."""

    def __init__(self, left):
        self.left, self.total = left, pretend_device.memory.total

    def on_step_begin(self, *args, **kwargs):
        pretend_device.memory.total = pretend_device.memory.allocated + self.left

    def on_step_end(self, *args, **kwargs):
        pretend_device.memory.total = self.total


@pytest.mark.parametrize(("task", "left"), [("dpo", 9_000_000), ("grpo", 3_500_000)])
def test_memory_that_runs_out_costs_a_warning_and_nothing_else(task, left, caplog):
    def make():
        crowded = [] if pretend_device.why_off() else [Crowded(left)]
        return {**arguments(task), "callbacks": crowded}

    result = assert_as_on_cpu(lambda: train(task, make=make, train_dataset=DATA[task](8, 0), memory_budget=1.0))
    assert result.trainer.planner.has_shrunk
    assert "An allocation failed" in caplog.text


def test_slices_that_are_computed_again_draw_from_the_device_what_they_drew(monkeypatch):
    """The first slice is given no keys, by whose device it would know where numbers are drawn."""

    def once():
        made = {**arguments("sft", model=make_model()), "peft_config": lora(lora_dropout=0.3)}
        with pretend_device.own_generator():
            return train(
                "sft", make=lambda: made, train_dataset=DATA["sft"](4, 0), max_tokens_per_micro_batch=12, steps=1
            )

    again = once()
    monkeypatch.setattr(slices, "checkpoint", lambda function, *args, use_reentrant: function(*args))
    kept = once()
    assert again.log_history[0]["flat/slices"] > 1
    assert off_by(kept, again, TOLERANCE) == {}


# --- models, data and precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "qwen3_moe", "gpt_oss"])
def test_layers_of_another_kind(name):
    """With a state, with experts, and with sinks."""
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if name == "qwen3_moe" else {}

    def make():
        return arguments("dpo", adapters=name != "gpt_oss", model=tiny_model(name, pad_token_id=0, **router))

    # Experts are computed by another function there, and layers with a state make more of rounding than others
    assert_as_on_cpu(lambda: train("dpo", make=make, **RECOMPUTED[0]), AS_PADDED)


IMAGES = {
    "dpo": (vision_pairs, {"max_tokens_per_micro_batch": 60}),
    "sft": (vision_messages, {"max_tokens_per_micro_batch": 60}),
    "kto": (vision_labelled, {}),
    "grpo": (vision_prompts, {"beta": 0.1, "num_iterations": 2}),
    "distillation": (vision_prompts, {}),
}


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("task", IMAGES)
def test_images(task, kind, slices_made):
    """Those of generated rows and of KTO's mismatched ones, too: found, cut and computed as on the CPU."""
    make, options = IMAGES[task]
    given = {"train_dataset": make(8, SEED), "dataloader_pin_memory": True, **options}
    layout = "flat" if task == "sft" else "shared"
    assert_as_on_cpu(lambda: run(task, layout, **on_images(kind, task, lora=True), **given))
    assert max(slices_made, default=1) > 1 or "max_tokens_per_micro_batch" not in options


def test_turns_of_conversations():
    data = split_turns(conversations(8, SEED))
    assert assert_as_on_cpu(lambda: train("sft", train_dataset=data)).log_history[0]["flat/saved_by_sharing"] > 0


def test_a_run_that_is_resumed(tmp_path):
    """Weights and the optimizer's state go to a file and come back, and so do those of the whole run."""
    saved = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path), "arrange_micro_batches": "tokens"}
    whole = assert_as_on_cpu(lambda: train("dpo", **saved))
    expected = {name: weight.clone() for name, weight in whole.weights.items()}
    whole.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert whole.trainer.state.log_history[-2]["step"] == 2
    for name, weight in whole.weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["varlen", "flash", "segment"])
@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_bfloat16_is_as_close_to_float32_as_with_padding(task, backend, layout):
    """Under autocast, whose rules are those of CUDA, by the kernels of a GPU and without them."""
    kernels = {"varlen": varlen_on(pretend_device.NAME), "flash": reference_flash(half_flash_func)}
    attention, options = "flash_attention_2" if backend == "flash" else "sdpa", {"dataloader_pin_memory": True}
    expected = test_kernels.padded(task)
    with kernels.get(backend, nullcontext()):
        ours = test_kernels.train(task, layout, attention, bf16=True, **options)
    assert ours.trainer.model.device == pretend_device.DEVICE
    assert ours.trainer.runtime.route.backend == backend
    assert_as_close(*expected, ours)


@pytest.mark.trl_1
@pytest.mark.parametrize("seed", range(SEED * 1000 + 700, SEED * 1000 + 703))
def test_a_random_draw_trains_the_same_or_is_refused_in_the_same_words(seed):
    drawn = draw(seed)
    drawn["ours"].pop("torch_compile_backend", None)  # the compiler asks for streams that a pretend device has not

    @float64_throughout()
    def outcome():
        return random_runs.train(drawn, True)

    try:
        with pretend_device.switched_off():
            outcome()
    except (ValueError, RuntimeError) as refused:
        words = re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(str(refused)))  # figures count what earlier tests hold
        with pytest.raises(type(refused), match=words):
            outcome()
    else:
        assert_as_on_cpu(outcome)


@pytest.mark.parametrize("given", ["text", "images", "a budget"])
@pytest.mark.parametrize("task", DATA)
def test_a_device_without_float64_is_proven_and_looked_at(task, given, monkeypatch):
    """As MPS. `padding_free(model)` is tried in `test_padded_calls.py`."""
    if given == "images" and task == "reward":
        pytest.skip("rewards are of text")

    def make():
        if given != "images":
            return arguments(task)
        return {**on_images("llava", task), "train_dataset": VISION_DATA[task](8, SEED)}

    monkeypatch.setattr("trl_paddingfree.core.device._WITHOUT_FLOAT64", (pretend_device.DEVICE.type,))
    options = {"max_tokens_per_micro_batch": 60} if given == "a budget" else {}
    with pretend_device.without(torch.float64):
        trained = train(task, make=make, check_steps=1, **options)
    found = trained.trainer._looks.found
    assert found.number
    assert all("in slices" in reason for reason in found.not_compared)


# --- the start-up check -----------------------------------------------------------------------------------------------


def test_the_check_takes_less_than_a_step_of_as_many_tokens(monkeypatch):
    """Most of what a step takes are logits, of all tokens: the check has the head compute few tokens at a time."""
    peaks, memory, prove_all = [], pretend_device.memory, StartUpCheck.prove_all

    def measured(run):
        gc.collect()
        memory.reset_peak()
        before = memory.allocated
        found = run()
        peaks.append(memory.peak - before)
        return found

    monkeypatch.setattr(StartUpCheck, "prove_all", lambda *args: measured(lambda: prove_all(*args)))
    model = make_model(vocab_size=4_000, hidden_size=64, max_position_embeddings=2048)
    rows = Dataset.from_dict({"input_ids": torch.randint(5, 69, (24, 100)).tolist()})
    options = {"per_device_train_batch_size": 24, "optim": "sgd", "steps": 1}
    given = {**arguments("sft", False), "model": model, "train_dataset": rows}
    measured(make_trainer("sft", "flat", **given, **options).train)
    of_check, of_step = peaks
    # Beside the layers of 2,432 tokens, as many as the step has, the head gets 515 at a time. It got all: 1.0 of a step
    assert of_check < 0.4 * of_step
