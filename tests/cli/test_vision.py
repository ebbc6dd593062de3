"""The commands on data with images: a model and a file, as a user would name them."""

import pytest

from tests.helpers.tiny import SEED
from tests.helpers.vision import IMAGE_ID, make_vision, vision_labelled, vision_messages, vision_pairs, vision_prompts
from trl_paddingfree.cli.train import main as train
from trl_paddingfree.images.collate import VisionPreferenceCollator
from trl_paddingfree.images.model import vision_rules


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = str(tmp_path_factory.mktemp("data") / "pairs.parquet")
    vision_pairs(8, SEED).to_parquet(file)
    return file


def test_inspect_counts_the_tokens_of_images(inspected, vision_dir, pairs):
    batch = inspected(pairs, "--batch_size", "8", "--max_length", "0", tokenizer=vision_dir)["batch_sizes"][0]
    model, processor = make_vision("llava")
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=vision_rules(model))
    counts = collator([*vision_pairs(8, SEED)])["flat_batch"].counts
    assert vision_rules(model).token_id == IMAGE_ID
    assert (batch["padded_slots"], batch["real_tokens"]) == (counts.padded, counts.real)
    assert batch["computed_tokens"] == counts.computed


def test_inspect_counts_groups_of_prompts_with_images(inspected, tmp_path, vision_dir):
    """Completions of one length, all different; of the data, two prompts are one text with one image."""
    rows = vision_prompts(4, SEED, most_images=1)
    rows.select([0, 1, 0]).to_parquet(tmp_path / "prompts.parquet")
    options = ["--batch_size", "3", "--num_generations", "3", "--max_completion_length", "5"]
    (batch, *_) = inspected(tmp_path / "prompts.parquet", *options, tokenizer=vision_dir)["batch_sizes"]
    # A mark before and after each text, its role, four tokens of the image, and two before the answer
    first, second = (3 + 4 + len(row["prompt"][0]["content"].split()) + 2 for row in rows.select([0, 1]))
    assert batch["real_tokens"] == 3 * (2 * first + second) + 9 * 5
    # The last token of a prompt is there for each completion; the two prompts have a beginning in common
    assert first + second - 2 + 9 * (1 + 5) - batch["computed_tokens"] in (1, 2)


@pytest.mark.parametrize("task", ["dpo", "sft", "kto", "grpo", "rloo", "distillation"])
def test_the_scripts_train_a_vision_model(tmp_path, capsys, vision_dir, pairs, task):
    file = pairs
    make = {"sft": vision_messages, "kto": vision_labelled}.get(task, vision_prompts)
    if task != "dpo":
        file = str(tmp_path / "data.parquet")
        make(8, SEED, 1).to_parquet(file)
    options = {"use_cpu": "true", "bf16": "false", "max_steps": "1", "report_to": "none", "dtype": "float32"}
    options |= {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": "4"}
    argv = ["--model_name_or_path", vision_dir, "--dataset_name", file, "--use_peft"]
    argv += ["--lora_target_modules", "all-linear"]
    if task in ("grpo", "rloo", "distillation"):
        options |= {"max_completion_length": "4"}
        options |= {"teacher_model_name_or_path": vision_dir} if task == "distillation" else {"num_generations": "4"}
    if task in ("grpo", "rloo"):
        argv += ["--reward_funcs", "think_format_reward"]
    train(task, [*argv, *(part for name, value in options.items() for part in (f"--{name}", value))])
    assert "Trained by padding-free" in capsys.readouterr().out
