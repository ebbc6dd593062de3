"""The commands on data with images: a model and a file, as a user would name them."""

import json
import os

import pytest

from tests.helpers.vision import IMAGE_ID, make_vision, vision_messages, vision_pairs
from trl_paddingfree.cli import main
from trl_paddingfree.cli.train import main as train
from trl_paddingfree.data.vision import VisionPreferenceCollator
from trl_paddingfree.model.vision import vision_rules

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = str(tmp_path_factory.mktemp("data") / "pairs.parquet")
    vision_pairs(8, SEED).to_parquet(file)
    return file


def test_inspect_counts_the_tokens_of_images(monkeypatch, tmp_path, capsys, vision_dir, pairs):
    monkeypatch.chdir(tmp_path)  # where the chart goes
    assert main(["inspect", pairs, "--tokenizer", vision_dir, "--batch_size", "8", "--max_length", "0", "--json"]) == 0
    (batch, *_) = json.loads(capsys.readouterr().out)["batch_sizes"]
    model, processor = make_vision("llava")
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=vision_rules(model))
    counts = collator([*vision_pairs(8, SEED)])["flat_batch"].counts
    assert vision_rules(model).token_id == IMAGE_ID
    assert (batch["padded_slots"], batch["real_tokens"]) == (counts.padded, counts.real)
    assert batch["computed_tokens"] == counts.computed


@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_the_scripts_train_a_vision_model(tmp_path, capsys, vision_dir, pairs, task):
    file = pairs
    if task == "sft":
        file = str(tmp_path / "messages.parquet")
        vision_messages(8, SEED).to_parquet(file)
    options = {"use_cpu": "true", "bf16": "false", "max_steps": "1", "report_to": "none", "dtype": "float32"}
    options |= {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": "4"}
    argv = ["--model_name_or_path", vision_dir, "--dataset_name", file, "--use_peft"]
    argv += ["--lora_target_modules", "all-linear"]
    train(task, [*argv, *(part for name, value in options.items() for part in (f"--{name}", value))])
    assert "Trained by padding-free" in capsys.readouterr().out
