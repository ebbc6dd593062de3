"""The studies of Reward, KTO, GRPO and RLOO on a tiny model: their figures, and TRL's commands beside ours."""

import math

import pytest
from datasets import Dataset

from tests.helpers.head_runs import prompts
from tests.helpers.tiny import conversations, preference_data
from trl_paddingfree.benchmark.studies import agreement, heads
from trl_paddingfree.benchmark.studies.agreement import agreement_report, differences_of, measure_agreement
from trl_paddingfree.benchmark.studies.heads import ARRANGED, METHODS, Setup, heads_report, measure_heads


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pairs = preference_data(24, 3).filter(lambda row: row["chosen"] != row["rejected"])
    for name, rows in (("pairs", pairs), ("prompts", prompts(16, 3)), ("conversations", conversations(8, 3))):
        rows.to_json(folder / f"{name}.jsonl")
    return {name: str(folder / f"{name}.jsonl") for name in ("pairs", "prompts", "conversations")}


@pytest.mark.parametrize(
    ("task", "source"), [("reward", "pairs"), ("kto", "pairs"), ("grpo", "prompts"), ("rloo", "prompts")]
)
def test_the_commands_log_what_trls_log(files, model_dir, task, source):
    found = measure_agreement(task, files[source], model_dir, max_steps="2")
    assert found["differences"]["loss"] < 1e-5
    assert {"grad_norm", "num_tokens"} < found["differences"].keys()
    assert [entry["step"] for entry in found["ours"]] == [1, 2]
    assert f"| {task}, {source} | 2 |" in agreement_report([found], "a machine")


def test_a_command_that_logs_something_else_is_an_error(files, model_dir, monkeypatch):
    logs = iter(([{"step": 1, "loss": 1.0}], [{"step": 1, "loss": 1.01}]))
    monkeypatch.setattr(agreement, "_logged", lambda *args: next(logs))
    with pytest.raises(AssertionError, match="reward: not within 0.001 of padded TRL: {'loss': 0.01"):
        measure_agreement("reward", files["pairs"], model_dir)


def test_differences_are_those_of_every_step_and_figure():
    padded = [{"loss": 0.5, "kl": None, "step_time": 3.0}, {"loss": -4.0, "reward": 1.0}]
    ours = [{"loss": 0.5, "kl": None}, {"loss": -4.2, "flat/computed_tokens": 3}]
    assert differences_of(padded, ours) == {"loss": pytest.approx(0.05), "kl": 0.0, "reward": math.inf}
    assert differences_of([{"kl": 1.0}], [{"kl": None}]) == differences_of([{"kl": None}], [{"kl": 1.0}])
    assert differences_of(padded, ours[:1])["loss"] == math.inf


@pytest.mark.parametrize(("task", "source"), [("kto", "pairs"), ("grpo", "conversations")])
def test_heads_are_measured_by_every_method(files, model_dir, task, source):
    setup = Setup(task, files[source], model_dir, num_layers=1, batch_size=8, max_length=64, steps=1)
    found = measure_heads(setup)
    methods = found["methods"]
    assert [*methods] == [*METHODS, *(ARRANGED if task == "grpo" else [])]
    padded, flat, shared = (methods[name] for name in METHODS)
    assert padded["flops"] > flat["flops"] > shared["flops"]
    assert padded["padded_slots"] == padded["computed_tokens"] > flat["computed_tokens"] > shared["computed_tokens"]
    assert len(padded["losses"]) == 2
    assert f"| {task}, {source}, batch 8, 64 tokens, 1 layers | ours, shared prefixes |" in heads_report([found], "x")


def test_methods_that_disagree_report_no_speed(files, model_dir, monkeypatch):
    losses = iter(([0.5], [0.6], [0.5]))
    monkeypatch.setattr(heads, "run_method", lambda *args, **kwargs: {"losses": next(losses)})
    with pytest.raises(AssertionError, match="kto, ours, padding-free: the losses are"):
        measure_heads(Setup("kto", files["pairs"], model_dir, num_layers=1, batch_size=2, max_length=64, steps=1))


def test_prompts_are_those_of_pairs_or_of_conversations():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = Dataset.from_list([{"messages": messages}])
    assert heads.prompts_of(rows)[0] == {"prompt": messages[:1]}
    assert heads.prompts_of(preference_data(2, 0)).column_names == ["prompt"]
