"""TRL's commands beside ours on a tiny model: what both log, and what a difference does."""

import math

import pytest

from tests.helpers.head_runs import prompts
from tests.helpers.tiny import preference_data
from trl_paddingfree.cli import agreement
from trl_paddingfree.cli.agreement import agreement_report, differences_of, measure_agreement


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pairs = preference_data(24, 3).filter(lambda row: row["chosen"] != row["rejected"])
    for name, rows in (("pairs", pairs), ("prompts", prompts(16, 3))):
        rows.to_json(folder / f"{name}.jsonl")
    return {name: str(folder / f"{name}.jsonl") for name in ("pairs", "prompts")}


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
    for nothing in (None, math.nan):
        assert differences_of([{"kl": 1.0}], [{"kl": nothing}]) == {"kl": math.inf}
        assert differences_of([{"kl": nothing}], [{"kl": 1.0}]) == {"kl": math.inf}
        assert differences_of([{"kl": nothing}], [{"kl": nothing}]) == {"kl": 0.0}
    assert differences_of(padded, ours[:1])["loss"] == math.inf
