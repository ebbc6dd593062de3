"""Looks of several processes on the CPU (gloo): each at its share, with one verdict, and no trace in training."""

import pytest
from safetensors.torch import load_file
from torch import equal

from tests.helpers.launching import launch, of_processes
from tests.runs import TOLERANCE

OPTIONS = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
GROUP = {"sequence_parallel_size": 2, "max_length": None}
DEEPSPEED = "gradients were not compared, because DeepSpeed computes whole backward passes only"
SLICES = "rows alone exceeded the budget, so that they were computed in slices, too"
RUNS = {
    "dpo": ("dpo", {}),
    "lora": ("dpo", {"lora": True, "gradient_accumulation_steps": 2}),
    "slices": ("sft", {"max_tokens_per_micro_batch": 15, "prefix_sharing": True}),
}
# How often each looks in two steps: at the model that trains and, of DPO, at the reference, which may be the same one
LOOKS = {"dpo": 4, "lora": 4, "slices": 2, "group": 4, "one row": 2, "lacking": 4}
LEFT_OUT = "rows could not be computed alone (OutOfMemoryError: no memory, on purpose)"


def assert_looks(model_dir, tmp_path, runs, engine=None, missing=(), looks_at=LOOKS):
    """Runs without looks and with one at each step are the same, and no look of any process finds a mistake."""
    given = {
        f"{name} {every}": (task, OPTIONS | more | {"check_steps": every})
        for name, (task, more) in runs.items()
        for every in (0, 1)
    }
    results = launch(
        2, *((task, model_dir, tmp_path / name, more) for name, (task, more) in given.items()), engine=engine
    )
    results = dict(zip(given, results, strict=True))
    for name in runs:
        without, looked = results[f"{name} 0"], results[f"{name} 1"]
        assert without["looks"] is None
        looks = looked["looks"]
        assert looks["number"] == looks_at[name]
        if name == "one row":  # which both processes of the group have looked at
            assert looks["rows"] == looks["number"]
        else:
            assert looks["rows"] > looks["number"]
        assert looks["largest_error"] < TOLERANCE
        assert {*looks["not_compared"]} <= {*missing, SLICES}
        assert {*missing} <= {*looks["not_compared"]}
        measured = ("time", "second", "memory", "check_error")
        for one, other in zip(without["log"], looked["log"], strict=True):
            kept = [{x: y for x, y in log.items() if not any(part in x for part in measured)} for log in (one, other)]
            assert kept[0] == kept[1]
        (file,) = (tmp_path / f"{name} 0").glob("*.safetensors")
        weights, others = load_file(file), load_file(tmp_path / f"{name} 1" / file.name)
        assert all(equal(weight, others[key]) for key, weight in weights.items())


def assert_a_leak_on_one_process_ends_all(
    model_dir, tmp_path, engine=None, found="differently from its rows one by one", **more
):
    options = OPTIONS | {"check_steps": 1, "leaks_on_rank": 1, "refused": True}
    launch(2, ("dpo", model_dir, tmp_path / "leak", options), engine=engine)
    other, own = of_processes(tmp_path / "leak")
    assert "computes the micro-batch before step 2" in own
    assert found in own
    assert "Another process has found a mistake in the micro-batch before step 2" in other


@pytest.mark.slow
def test_two_processes(model_dir, tmp_path):
    assert_looks(model_dir, tmp_path, RUNS)
    assert_a_leak_on_one_process_ends_all(model_dir, tmp_path)


@pytest.mark.slow
def test_fsdp2(model_dir, tmp_path):
    assert_looks(model_dir, tmp_path, RUNS, "fsdp")
    assert_a_leak_on_one_process_ends_all(model_dir, tmp_path, "fsdp")


@pytest.mark.slow
def test_a_group_of_processes(model_dir, tmp_path):
    runs = {"group": ("dpo", GROUP), "one row": ("sft", GROUP | {"per_device_train_batch_size": 1})}
    assert_looks(model_dir, tmp_path, runs)
    runs = {"lacking": ("dpo", GROUP | {"lacks_memory_on_rank": 0})}
    assert_looks(model_dir, tmp_path, runs, missing=[LEFT_OUT])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(model_dir, tmp_path, stage):
    """DeepSpeed's engines give no gradients before they train."""
    pytest.importorskip("deepspeed")
    runs = {name: RUNS[name] for name in ("dpo", "lora")}
    # Without adapters, TRL calls the model outside of the engine
    assert_looks(model_dir, tmp_path, runs, f"zero{stage}", [DEEPSPEED], looks_at={**LOOKS, "lora": 2})
    assert_a_leak_on_one_process_ends_all(model_dir, tmp_path, f"zero{stage}", "answers to row")
