"""The study of Reward, KTO and GRPO on a tiny model."""

import pytest

from scripts.benchmark.studies import heads
from scripts.benchmark.studies.heads import ARRANGED, METHODS, measure

SMALL = {"num_layers": 1, "batch_size": 8, "max_length": 64, "accumulation": 1}


@pytest.mark.parametrize(("task", "source"), [("kto", "pairs"), ("grpo", "conversations")])
def test_heads_are_measured_by_every_method(files, model_dir, task, source):
    found = measure(task, files[source], model_dir, **SMALL)
    methods = found["methods"]
    assert [*methods] == [*METHODS, *(ARRANGED if task == "grpo" else [])]
    padded, flat, shared = (methods[name] for name in METHODS)
    assert padded["flops"] > flat["flops"] > shared["flops"]
    assert padded["padded_slots"] == padded["computed_tokens"] > flat["computed_tokens"] > shared["computed_tokens"]
    assert len(padded["losses"]) == 2
    assert f"| {task}, {source}, batch 8, 64 tokens, 1 layers | ours, shared prefixes |" in heads.report(
        {"measured": [found], "environment": {"gpu": "machine"}}
    )


def test_methods_that_disagree_report_no_speed(files, model_dir, monkeypatch):
    losses = iter(([0.5], [0.6], [0.5]))
    monkeypatch.setattr(heads, "run_method", lambda *args, **kwargs: ({"losses": next(losses)}, []))
    with pytest.raises(AssertionError, match="kto, ours, padding-free: the losses are"):
        measure("kto", files["pairs"], model_dir, **SMALL)
