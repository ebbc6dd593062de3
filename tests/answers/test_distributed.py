"""Two processes train on several answers per prompt what one trains, and a run resumes to the same end."""

from tests.answers.runs import arguments, scored
from tests.helpers.launching import alone, assert_same_run, launch
from tests.runs import assert_same, make_trainer, train


def test_two_processes_train_as_one(model_dir, tmp_path):
    options = {"answers": True, "max_steps": 2, "on_disk": True}
    cases = {
        "whole": {},
        "precomputed": {"precompute_ref_log_probs": True},
        "parts": {"max_tokens_per_micro_batch": 90},
    }
    runs = [
        ("dpo", model_dir, tmp_path / f"{name} 2", {**options, **given, "per_device_train_batch_size": 2})
        for name, given in cases.items()
    ]
    two = launch(2, *runs)
    one = alone("dpo", model_dir, tmp_path / "1", {**options, "per_device_train_batch_size": 4})
    for result in two:
        assert result["world"] == 2
        assert_same_run(result, one)
        assert [log["flat/pairs"] for log in result["log"] if "loss" in log] == [12, 12]


def test_a_run_resumes_to_the_same_end(tmp_path):
    def make():
        options = {"train_dataset": scored(8, 1), "per_device_train_batch_size": 2, "max_steps": 4}
        return make_trainer(
            "dpo", "ours", **arguments("dpo"), **options, save_strategy="steps", save_steps=2, output_dir=str(tmp_path)
        )

    whole = train(make())
    resumed = train(make(), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(whole, resumed, 0, ("num_tokens", "_runtime", "_per_second", "flat/", "train_loss"))
