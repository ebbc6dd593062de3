"""Two processes train on several answers per prompt what one trains, and a run resumes to the same end."""

import pytest

from tests.answers.runs import arguments, scored
from tests.core.trainers.test_distributed import assert_trains_as_one
from tests.helpers.launching import alone, assert_same_run, launch, launch_each
from tests.runs import assert_same, make_trainer, train

# Numbers of answers: with as many for each prompt, micro-batches of two processes weigh as that of one
ALIKE, DIFFERENT = [3], [3, 2, 2]


def test_two_processes_train_as_one(model_dir, tmp_path):
    options = {"answers": ALIKE, "max_steps": 2, "on_disk": True}
    cases = {
        "whole": {},
        "precomputed": {"precompute_ref_log_probs": True},
        "parts": {"max_tokens_per_micro_batch": 90},
        "a group": {"sequence_parallel_size": 2, "per_device_train_batch_size": 4},
    }
    runs = [
        ("dpo", model_dir, tmp_path / f"{name} 2", {**options, "per_device_train_batch_size": 2, **given})
        for name, given in cases.items()
    ]
    two = launch(2, *runs)
    one = alone("dpo", model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    for result in two:
        assert result["world"] == 2
        assert_same_run(result, one)
        assert [log["flat/pairs"] for log in result["log"] if "loss" in log] == [12, 12]


@pytest.mark.parametrize("task", ["dpo", pytest.param("reward", marks=pytest.mark.slow)])
def test_processes_with_different_numbers_of_pairs_train_as_with_padding(model_dir, tmp_path, task):
    """TRL gathers numbers of each pair. Streams, too, whose batches accelerate would cut into equal parts."""
    options = {"answers": DIFFERENT, "max_steps": 3, "per_device_train_batch_size": 2, "max_length": 64}
    options |= {"evaluate": True, "eval_strategy": "steps", "eval_steps": 3}
    parts = {"max_tokens_per_micro_batch": 90}
    settings = {"padded": {"padding_free": False}, "flat": {}, "parts": parts}
    settings |= {f"{name}, streams": {**given, "streams": True} for name, given in settings.items() if name != "parts"}
    runs = launch_each(task, model_dir, tmp_path, {name: {**options, **given} for name, given in settings.items()})
    for name, padded in (("flat", "padded"), ("parts", "padded"), ("flat, streams", "padded, streams")):
        assert_same_run(runs[padded], runs[name], ignore=())
    pairs = [log["flat/pairs"] for log in runs["flat"]["log"] if "loss" in log]
    assert {*pairs} - {4, 12}  # of two times two prompts with one pair or three


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
def test_weights_in_shards_train_as_whole_ones(model_dir, tmp_path, engine):
    if engine != "fsdp":
        pytest.importorskip("deepspeed")
    cases = {
        "dpo": ("dpo", {"answers": ALIKE}, {}),
        "dpo, LoRA, parts": ("dpo", {"answers": ALIKE, "lora": True}, {"max_tokens_per_micro_batch": 90}),
        "precomputed": ("dpo", {"answers": ALIKE, "precompute_ref_log_probs": True, "on_disk": True}, {}),
        # Proven once its weights are sharded; no pair is too long
        "reward": ("reward", {"answers": ALIKE, "leaks": False, "max_length": 128}, {}),
    }
    assert_trains_as_one(lambda _: model_dir, tmp_path, cases, engine, "FSDP" if engine == "fsdp" else "DEEPSPEED")


def test_a_run_resumes_to_the_same_end(tmp_path):
    def make():
        options = {"train_dataset": scored(8, 1), "per_device_train_batch_size": 2, "max_steps": 4}
        return make_trainer(
            "dpo", "ours", **arguments("dpo"), **options, save_strategy="steps", save_steps=2, output_dir=str(tmp_path)
        )

    whole = train(make())
    resumed = train(make(), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(whole, resumed, 0, ("num_tokens", "_runtime", "_per_second", "flat/", "train_loss"))
