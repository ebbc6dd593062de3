"""The commands of Reward, KTO, GRPO, RLOO and distillation, and `inspect` on their data."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from tests.helpers.tiny import DATA, reward_model
from trl_paddingfree.cli import main
from trl_paddingfree.cli.train import main as train_main

TASKS = ["reward", "kto", "grpo", "rloo", "distillation"]
OPTIONS = {
    **dict.fromkeys(("grpo", "rloo"), ["--reward_funcs", "tests.helpers.tiny.score", "--max_completion_length", "4"]),
    "distillation": ["--max_completion_length", "4"],
}


@pytest.mark.parametrize("task", TASKS)
def test_a_command_trains_and_saves_a_model(capsys, tmp_path, model_dir, task):
    path, out = tmp_path / "data.jsonl", tmp_path / "out"
    DATA[task](16, 1).to_json(path)
    argv = ["--model_name_or_path", model_dir, "--dataset_name", str(path), "--output_dir", str(out)]
    argv += ["--max_steps", "1", "--report_to", "none", "--use_peft", "--lora_target_modules", "all-linear"]
    if torch.accelerator.is_available():
        argv += ["--use_cpu", "true", "--bf16", "false"]
    argv += ["--teacher_model_name_or_path", model_dir] if task == "distillation" else []
    train_main(task, [*argv, *OPTIONS.get(task, [])])
    printed, said = capsys.readouterr()
    assert torch.accelerator.is_available() or "training on the CPU (`--use_cpu true --bf16 false`)" in said
    assert "Trained by padding-free (segment, shared prefixes)" in printed
    assert {"reward": "pairs", "kto": "completions"}.get(task, "completions") + " per second" in printed
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert "computed the batches: padding-free (segment, shared prefixes)." in (out / "README.md").read_text()


def test_check_tries_a_reward_model(capsys, tmp_path):
    for pad_token_id, code in ((0, 0), (None, 2)):
        reward_model(pad_token_id=pad_token_id).save_pretrained(tmp_path)
        assert main(["check", str(tmp_path)]) == code
    printed = capsys.readouterr()
    assert "LlamaForSequenceClassification on cpu" in printed.out
    assert "by `config.pad_token_id`, and it is not set" in printed.err


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Name what rewards completions"),
        (["--reward_funcs", "no_reward"], "`--reward_funcs no_reward` is not"),
    ],
)
def test_rewards_that_cannot_be_found_are_named_in_one_line(capsys, model_dir, pairs_file, task, options, message):
    argv = ["--model_name_or_path", model_dir, "--dataset_name", pairs_file, *options]
    with pytest.raises(SystemExit) as stopped:
        train_main(task, argv)
    assert stopped.value.code == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith(f"trl-paddingfree {task}: {message}")
    with pytest.raises(ValueError, match=message):
        train_main(task, [*argv, "--traceback"])


def test_inspect_counts_prompts_with_their_completions(inspected, tmp_path):
    path = tmp_path / "rows.jsonl"
    Dataset.from_list([{"prompt": "w1 w2 w3"}, {"prompt": "w4 w5 w6 w7 w8"}]).to_json(path)
    report = inspected(path, "--batch_size", "2", "--num_generations", "4", "--max_completion_length", "10")
    (row,) = report["batch_sizes"]
    assert (report["task"], report["max_length"], report["lengths"]["max"]) == ("grpo", None, 5)
    assert (row["padded_slots"], row["real_tokens"]) == (8 * 15, 4 * 13 + 4 * 15)
    # Each completion follows a copy of the prompt's last token of its own
    assert row["computed_tokens"] == (2 + 4 * 11) + (4 + 4 * 11)


def test_a_teacher_that_is_not_named_or_not_there_is_said_in_one_line(capsys, model_dir):
    argv = ["distillation", "--model_name_or_path", model_dir, "--dataset_name", "x", "--use_cpu", "true"]
    teachers = (
        ([], "Name the teacher: `--teacher_model_name_or_path`"),
        (["./none"], "'./none' is not a file or folder"),
    )
    for teacher, message in teachers:
        named = [x for name in teacher for x in ("--teacher_model_name_or_path", name)]
        assert main([*argv, "--bf16", "false", *named]) == 2
        assert f"trl-paddingfree distillation: {message}" in capsys.readouterr().err
