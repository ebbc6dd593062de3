"""TRL's commands beside ours on a tiny model: what both log, and what a difference does."""

import pytest

from scripts.benchmark.studies import agreement
from scripts.benchmark.studies.agreement import measure


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("task", "source"), [("reward", "pairs"), ("kto", "pairs"), ("grpo", "prompts"), ("rloo", "prompts")]
)
def test_the_commands_log_what_trls_log(files, model_dir, task, source):
    found = measure(task, files[source], model_dir, max_steps="2")
    assert found["differences"]["loss"] < 1e-5
    assert {"grad_norm", "num_tokens"} < found["differences"].keys()
    assert [entry["step"] for entry in found["ours"]] == [1, 2]
    assert f"| {task}, {source} | 2 |" in agreement.report({"measured": [found], "environment": {"gpu": "machine"}})


def test_a_command_that_logs_something_else_is_an_error(files, model_dir, monkeypatch):
    logs = iter(([{"step": 1, "loss": 1.0}], [{"step": 1, "loss": 1.01}]))
    monkeypatch.setattr(agreement, "_logged", lambda *args: next(logs))
    with pytest.raises(AssertionError, match="reward: not within 0.001 of padded TRL: {'loss': 0.01"):
        measure("reward", files["pairs"], model_dir)
