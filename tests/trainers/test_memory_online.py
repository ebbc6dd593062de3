"""GRPO and RLOO under a memory budget: no decision changes a figure."""

import os
import re
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers.dpo_runs import lora
from tests.helpers.equivalence import assert_same
from tests.helpers.head_runs import prompts, score, ties_broken, train
from tests.helpers.memory import failing
from tests.helpers.tiny import following_rotary, make_model, make_tokenizer
from tests.helpers.versions import is_older
from trl_paddingfree.memory.budget import Budget
from trl_paddingfree.memory.device import GIB
from trl_paddingfree.memory.plan import MemoryBudget
from trl_paddingfree.model import forward
from trl_paddingfree.trainers.base import FlatTrainer

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
LAYERS = 3
# What a run logs of time and of memory differs
FIGURES = ("loss", "grad_norm", "reward", "kl", "entropy", "entropy_coef", "num_tokens", "clip_ratio/region_mean")


@pytest.fixture(scope="module")
def data():
    return prompts(16, SEED)


def plain():
    model = make_model(num_hidden_layers=LAYERS)
    return {"model": model, "processing_class": make_tokenizer(), "reward_funcs": score}


def with_lora():
    return {**plain(), "peft_config": lora(lora_dropout=0.3)}


def same(one, other):
    """Whether two runs logged the same figures and ended with the same weights, to the last bit."""
    for a, b in zip(one.log_history, other.log_history, strict=True):
        assert {name: a[name] for name in FIGURES if name in a} == {name: b[name] for name in FIGURES if name in b}
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.fixture
def parts_made(monkeypatch):
    """How many parts each pass that trains ran in."""
    made, divided = [], Budget.decide

    def watch(*args, **kwargs):
        batch = divided(*args, **kwargs)
        made.append(max(len(batch.parts), 1))
        return batch

    monkeypatch.setattr(Budget, "decide", watch)
    return made


# --- The decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "make", "reentrant"), [("grpo", plain, False), ("rloo", with_lora, True)], ids=["grpo", "rloo"]
)
def test_every_number_of_recomputed_layers_computes_the_same(data, task, make, reentrant, monkeypatch):
    # Four passes that train, each with another number
    options = {"gradient_accumulation_steps": 2, "num_iterations": 2}
    expected = train(task, "shared", make, data, **options)
    numbers = iter(range(LAYERS + 1))
    monkeypatch.setattr(MemoryBudget, "num_recomputed", lambda *_: next(numbers))
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    result = train(task, "shared", make, data, memory_budget=8, **options, **kwargs)
    same(expected, result)
    shares = [entry["flat/recomputed"] for entry in result.log_history if "loss" in entry]
    assert shares == pytest.approx([(0 + 1) / 2 / LAYERS, (2 + 3) / 2 / LAYERS])


@pytest.fixture(scope="module")
def with_room(data):
    """A budget in GiB with room for most of the activations of a micro-batch, all of them recomputed."""
    trainer = train("grpo", "shared", plain, data, memory_budget=8, steps=1).trainer
    steps, memory, fixed = trainer.flat.steps, trainer.flat.memory, trainer.flat.memory.needs.fixed
    return (fixed + steps.budget.gradient_bytes + 0.7 * (memory.peak(memory.current.batch, LAYERS) - fixed)) / GIB


@pytest.mark.parametrize(
    ("options", "reentrant"),
    [
        ({"loss_type": "grpo", "gradient_accumulation_steps": 2}, True),
        ({"loss_type": "bnpo", "top_entropy_quantile": 0.5, "use_adaptive_entropy": True}, False),
    ],
    ids=["grpo", "bnpo"],
)
def test_parts_have_the_loss_of_the_whole(data, options, reentrant, with_room, parts_made):
    with ties_broken():
        whole = train("grpo", "shared", plain, data, **options)
        kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        parts = train("grpo", "shared", plain, data, memory_budget=with_room, **options, **kwargs)
    assert max(parts_made) > 1
    assert_same(whole, parts)


@pytest.mark.parametrize(("task", "loss_type"), [("grpo", "bnpo"), ("rloo", None)], ids=["grpo", "rloo"])
def test_a_limit_of_tokens_makes_parts_with_the_loss_of_padded_trl(data, task, loss_type, parts_made):
    def make():
        return {**plain(), "peft_config": lora()}

    options = {} if loss_type is None else {"loss_type": loss_type}
    options |= {"num_iterations": 2, "gradient_checkpointing_kwargs": {"use_reentrant": task == "rloo"}}
    padded = train(task, "padded", make, data, **options)
    limited = {"max_tokens_per_micro_batch": 25, "oversized_examples": "alone"}
    parts = train(task, "shared", make, data, **options, **limited)
    assert max(parts_made) > 1
    assert_same(padded, parts)
    # Rows are known once they are generated: of those that may come, the longest has to fit
    with pytest.raises(ValueError, match="=25` is less than .*, lower `max_completion_length`"):
        train(task, "shared", make, data, max_tokens_per_micro_batch=25, max_completion_length=30)


def test_rows_of_a_prompt_share_a_part(data, parts_made):
    """By themselves, rows of a long prompt need many times what they need together."""
    words = " ".join(["word"] * 40)
    long = data.map(lambda row: {"prompt": [{"role": "user", "content": f"{words} {row['prompt'][0]['content']}"}]})
    whole = train("grpo", "shared", plain, long, steps=1).trainer.total_counts()
    most = {"max_tokens_per_micro_batch": int(0.9 * whole.computed), "oversized_examples": "alone"}
    parts = train("grpo", "shared", plain, long, steps=1, **most).trainer.total_counts()
    assert parts.computed < 2 * whole.computed < whole.real
    assert max(parts_made) == 2


def test_a_row_above_the_limit_is_refused_where_prompts_were_not_known(data):
    stream = data.to_iterable_dataset()
    with pytest.raises(ValueError, match=r"=35` is less than a row needs \(\d+ tokens\)"):
        train("grpo", "shared", plain, stream, max_tokens_per_micro_batch=35, max_completion_length=30)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_parts_have_the_frequencies_of_the_whole(data, kind, parts_made, monkeypatch):
    def make():
        return {**plain(), "model": make_model(**following_rotary(24, kind))}

    monkeypatch.setattr(MemoryBudget, "can_hold", lambda _, batch, *beside: len(batch.row_index) < 2)
    monkeypatch.setattr(MemoryBudget, "keeps_all", MemoryBudget.can_hold)
    assert_same(train("grpo", "padded", make, data), train("grpo", "flat", make, data, memory_budget=8))
    assert max(parts_made) > 1


def test_counting_bytes_leaves_frequencies_as_they_were(data):
    """Those of rows longer than all of training would stay."""

    def make():
        return {**plain(), "model": make_model(**following_rotary(24, "dynamic"))}

    rotary = train("grpo", "flat", make, data, memory_budget=8, steps=1).trainer.model.model.rotary_emb
    assert rotary.max_seq_len_cached < 60


def test_parts_are_computed_again_as_they_were(data, parts_made, monkeypatch):
    monkeypatch.setattr(MemoryBudget, "can_hold", lambda _, batch, *beside: len(batch.row_index) < 3)
    monkeypatch.setattr(MemoryBudget, "keeps_all", MemoryBudget.can_hold)
    runs = []
    for compute in (checkpoint, lambda function, *args, use_reentrant: function(*args)):
        monkeypatch.setattr(forward, "checkpoint", compute)
        runs.append(train("rloo", "shared", with_lora, data, memory_budget=8, steps=1))
    assert max(parts_made) > 1
    same(*runs)


def test_a_budget_that_the_longest_completion_does_not_fit_into_is_refused(data):
    def least(**options):
        with pytest.raises(ValueError, match=r"`max_completion_length=\d+` needs: .* at least [\d.]+") as error:
            train("grpo", "shared", plain, data, memory_budget=0.0001, **options)
        return float(re.search(r"at least ([\d.]+), or", str(error.value))[1])

    assert least(max_completion_length=1000) > least()
    train("grpo", "shared", plain, data, memory_budget=least(), steps=1)


@pytest.mark.skipif(is_older("5.20"), reason="a mixture with a router loss cannot generate: padded neither")
def test_the_loss_of_routers_in_parts_is_that_of_the_whole(data, parts_made):
    def make():
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
        return {**plain(), "model": make_model("mixtral", output_router_logits=True, **sizes)}

    steps = train("grpo", "flat", make, data, memory_budget=8, steps=1).trainer.flat.steps
    memory, fixed = steps.budget.memory, steps.budget.memory.needs.fixed
    budget = fixed + steps.budget.gradient_bytes + 0.7 * (memory.peak(memory.current.batch, len(memory.layers)) - fixed)
    whole = train("grpo", "padded", make, data)
    assert_same(whole, train("grpo", "flat", make, data, memory_budget=budget / GIB))
    assert max(parts_made) > 1


def test_the_memory_that_vllm_leaves_is_not_guessed(data):
    options = {"use_vllm": True, "vllm_mode": "colocate", "memory_budget": "auto"}
    with pytest.raises(ValueError, match="does not know what vLLM leaves"):
        train("grpo", "shared", plain, data, **options)


# --- Allocations that fail -------------------------------------------------------------------------------------------


def fail(monkeypatch, attempts, in_backward, prepare=lambda memory: None):
    """Have allocations fail in the passes that train, once there is a plan."""
    begin = FlatTrainer.plan_steps

    def plan(trainer):
        planned = trainer.flat.memory is not None
        begin(trainer)
        if not planned and (memory := trainer.flat.memory) is not None:
            prepare(memory)
            failing(trainer, attempts, in_backward).__enter__()

    monkeypatch.setattr(FlatTrainer, "plan_steps", plan)


def without_head(memory):
    """So small a model is all head."""
    memory.needs = replace(memory.needs, tile=(0, 0))


@pytest.mark.parametrize(("where", "splits"), [("forward", True), ("backward", False)])
def test_a_failed_allocation_costs_a_warning_and_nothing_else(data, where, splits, monkeypatch, caplog):
    options = {"gradient_accumulation_steps": 2, "use_adaptive_entropy": True, "entropy_target": 4.0}
    expected = train("grpo", "shared", plain, data, gradient_checkpointing=False, **options)
    # In the second micro-batch, when there are gradients already; or in the third, for which rows have been generated
    prepare = {} if splits else {"prepare": without_head}
    fail(monkeypatch, {1} if where == "backward" else {2}, where == "backward", **prepare)
    generated = []

    def counted(completions, **_):
        generated.append(1)
        return score(completions)

    counted.__name__ = score.__name__
    result = train("grpo", "shared", lambda: {**plain(), "reward_funcs": counted}, data, memory_budget=8, **options)
    assert sum("An allocation failed" in message for message in caplog.messages) == 1
    assert len(generated) == 2  # nothing is generated again
    assert_same(expected, result)


def test_parts_that_add_to_gradients_twice_are_not_computed_again(data, monkeypatch):
    monkeypatch.setattr(MemoryBudget, "can_hold", lambda _, batch, *beside: len(batch.row_index) < 3)
    monkeypatch.setattr(MemoryBudget, "keeps_all", MemoryBudget.can_hold)
    monkeypatch.setattr(MemoryBudget, "num_recomputed", lambda *_: 1)
    fail(monkeypatch, {0}, True)
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "memory_budget": 8}
    with pytest.raises(torch.OutOfMemoryError, match="on purpose\nLayers that recompute within parts"):
        train("grpo", "shared", plain, data, **kwargs)
