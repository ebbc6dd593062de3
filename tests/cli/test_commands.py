"""The command line, as a user types it: results, exit codes, and messages that say what to change."""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments

import trl_paddingfree
from tests.helpers.launching import finished
from tests.helpers.tiny import conversations, make_model, preference_data, prompt_completions, unpaired
from tests.runs import make_trainer, run
from trl_paddingfree import PaddingFreeOptions
from trl_paddingfree.cli.load import load_data
from trl_paddingfree.cli.main import main
from trl_paddingfree.cli.train import main as run_script

TRAINING = ["dpo", "sft", "reward", "kto", "grpo", "rloo", "distillation"]
COMMANDS = ["inspect", "check", *TRAINING, "env", "quickstart"]
MODES = ["keep_start", "keep_end"]
PNG = b"\x89PNG"
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


@pytest.fixture(scope="module")
def roberta_dir(tmp_path_factory):
    """A model that no route keeps from mixing sequences."""
    folder = tmp_path_factory.mktemp("roberta")
    make_model("roberta").save_pretrained(folder)
    return str(folder)


def json_of(capsys, *argv):
    """Exit code and the JSON that a command prints, which must be all that it prints."""
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_help_lists_every_command_with_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert [name for name in COMMANDS if f"\n    {name}" not in printed] == []
    assert "examples:\n  trl-paddingfree " in printed
    assert "exit codes:\n  0" in printed


@pytest.mark.parametrize("command", ["inspect", "check", "env", "quickstart"])
def test_the_help_of_a_command_shows_how_to_call_it(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"examples:\n  trl-paddingfree {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", TRAINING)
def test_the_help_of_scripts_is_their_own(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert f"usage: trl-paddingfree {command}" in printed
    ours, others = printed.split("options of trl-paddingfree:")[1].split("\n\n")[0], printed.split("\noptions:\n")[1]
    for name in [*vars(PaddingFreeOptions()), "traceback", *(["batch_method"] if command == "sft" else [])]:
        assert f"\n  --{name} " in ours
        assert f"\n  --{name} " not in others.replace(ours, "")
    assert "\n  --learning_rate " in others.replace(ours, "")


def texts(n, seed):
    return prompt_completions(n, seed).select_columns("completion").rename_column("completion", "text")


COUNTED = [("dpo", partial(preference_data, conversational=x), mode) for x in (True, False) for mode in MODES]
COUNTED += [("sft", make, None) for make in (conversations, prompt_completions, texts)] + [("kto", unpaired, None)]


@pytest.mark.trl_1
@pytest.mark.parametrize(("task", "make_data", "mode"), COUNTED)
def test_inspect_counts_what_training_counts(inspected, tmp_path, task, make_data, mode):
    data, path = make_data(30, 7), tmp_path / "rows.jsonl"
    data.to_json(path)
    report = inspected(path, "--batch_size", "30", "--max_length", "24", "--truncation_mode", mode or MODES[0])
    options = {
        "max_length": 24,
        "per_device_train_batch_size": 30,
        "steps": 1,
        **({"truncation_mode": mode} if mode else {}),
    }
    counts = run(task, "shared", train_dataset=data, **options).trainer.total_counts()
    (row,) = report["batch_sizes"]
    assert report["task"] == task
    assert (row["computed_tokens"], row["real_tokens"], row["padded_slots"]) == counts.as_tuple()[:3]
    assert row["predicted_speed_up_with_sharing"] == counts.padded / counts.computed
    assert row["wasted_by_padding"] == 1 - counts.real / counts.padded > 0
    assert row["saved_by_sharing"] == 1 - counts.computed / counts.real
    assert task == "sft" or counts.computed < counts.real


def test_inspect_finds_the_pairs_that_trl_truncates_and_drops(inspected, pairs_file):
    report, whole = (inspected(pairs_file, "--max_length", max_length) for max_length in ("16", "0"))
    data = Dataset.from_json(pairs_file)
    kept = make_trainer("dpo", "padded", train_dataset=data, max_length=16).train_dataset
    cut = sum(len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) > 16 for row in kept)
    assert report["num_dropped"] == len(data) - len(kept) > 0
    assert report["num_truncated"] == cut > 0
    assert (whole["num_dropped"], whole["num_truncated"], whole["max_length"]) == (0, 0, None)
    assert whole["lengths"] == report["lengths"]
    assert whole["lengths"]["max"] > 16


def test_inspect_finds_the_rows_that_trl_drops_from_instructions(inspected, tmp_path):
    data, path = prompt_completions(20, 4), tmp_path / "rows.jsonl"
    data.to_json(path)
    report = inspected(path, "--max_length", "8")
    whole, cut = (
        make_trainer("sft", "padded", train_dataset=data, max_length=limit).train_dataset for limit in (None, 8)
    )
    assert report["num_dropped"] == len(whole) - len(cut) > 0
    assert report["num_truncated"] == sum(len(ids) > 8 for ids in whole["input_ids"]) - report["num_dropped"] > 0


def test_inspect_draws_the_same_sample_for_the_same_seed(inspected, pairs_file):
    options = ["--batch_size", "2", "--sample", "12"]
    reports = [inspected(pairs_file, *options, "--seed", seed) for seed in ("1", "1", "2")]
    assert reports[0] == reports[1] != reports[2]
    assert (reports[0]["num_rows"], reports[0]["num_sampled"]) == (30, 12)
    assert [row["batch_size"] for row in reports[0]["batch_sizes"]] == [2, 4, 8]


def test_inspect_prints_a_table_and_draws_a_chart(capsys, tmp_path, pairs_file, model_dir):
    chart = tmp_path / "chart.png"
    assert main(["inspect", pairs_file, "--tokenizer", model_dir, "--batch_size", "4", "--plot", str(chart)]) == 0
    printed = capsys.readouterr()
    assert "DPO: 30 of 30 pairs" in printed.out
    assert "speed-up" in printed.out
    assert f"Chart: {chart}" in printed.err.replace("\n", "")
    assert chart.read_bytes()[:4] == PNG


def test_inspect_writes_nothing_unasked(monkeypatch, tmp_path, pairs_file, model_dir):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["inspect", pairs_file, "--tokenizer", model_dir]) == 0
    assert [*(tmp_path / "here").iterdir()] == []


def test_inspect_without_matplotlib_says_what_to_install(capsys, monkeypatch, pairs_file, model_dir):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["inspect", pairs_file, "--tokenizer", model_dir, "--plot", "chart.png"]) == 0
    assert 'pip install "trl-paddingfree[plot]"' in capsys.readouterr().err


FILES = {
    "odd.jsonl": '{"a": "b"}',
    "prompts.jsonl": '{"prompt": "b", "text": "c"}',
    "nulls.jsonl": '{"text": "c"}\n{"text": null}',
    "images.jsonl": '{"image": "a.png", "prompt": "a", "completion": "b"}',
    "notes.txt": "a",
    "empty.jsonl": "",
    "empty.csv": "",
}
# What follows `inspect --tokenizer MODEL`, or a whole command; and what is said
WRONG = {
    "nowhere/nothing": "'nowhere/nothing' is not a file or folder here, nor in the cache of the hub, and the hub is ",
    "pair.jsonl": "'pair.jsonl' is not a file or folder here: is it misspelt?\n",
    "pairs.jsonl --tokenizer nowhere": "'nowhere' is not a file or folder here",
    "check nowhere": "'nowhere' is not a file or folder here",
    "odd.jsonl": "Preference data needs 'chosen' and 'rejected'",
    "pairs.jsonl --dataset_train_split dev": "only ['train']: name one with `--dataset_train_split`",
    "prompts.jsonl": "or, without a `prompt`, one of",
    "nulls.jsonl": "Row 1 of the inspected data: `text` is None",
    "images.jsonl": " is not a model that reads them",
    "pairs.jsonl --batch_size 0": "`--batch_size 0` must be",
    "pairs.jsonl --max_length 1": "Raise `max_length`",
    "pairs.jsonl --model llama-3-9b": "'llama-3-9b' is not one of the shapes llama-3-8b, ",
    "pairs.jsonl --memory_gib 24": "`--memory_gib 24.0` needs `--model`",
    "notes.txt": "name a file that has one",
    "empty.jsonl": "'empty.jsonl' is an empty file",
    "empty.csv": "'empty.csv' is an empty file",
    "check MODEL --attn_implementation flash_attention_2": "FlashAttention2",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_done_exits_2_with_one_message(capsys, monkeypatch, tmp_path, pairs_file, model_dir, command):
    monkeypatch.chdir(tmp_path)
    for name, written in FILES.items():
        (tmp_path / name).write_text(written)
    words = [model_dir if word == "MODEL" else word for word in command.split()]
    argv = words if words[0] == "check" else ["inspect", "--tokenizer", model_dir, *words]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"trl-paddingfree {argv[0]}: ")
    assert WRONG[command] in printed.err
    assert "Traceback" not in printed.err
    with pytest.raises((ValueError, OSError, ImportError)):
        main([*argv, "--traceback"])


def test_unknown_arguments_exit_2():
    for command in ("", "no-such-command", "inspect", "env --nonsense"):
        with pytest.raises(SystemExit) as stopped:
            main(command.split())
        assert stopped.value.code == 2


def test_check_tries_every_route_and_passes_a_llama(capsys, model_dir):
    code, report = json_of(capsys, "check", model_dir)
    assert code == 0
    assert report["passed"]
    assert report["chosen"]["backend"] == "segment"
    assert report["chosen"]["prefix_sharing"]
    assert [route["backend"] for route in report["routes"]] == ["flash", "varlen", "segment", "positions", "mask"]
    tried = [route for route in report["routes"] if route["results"]]
    assert [(route["backend"], len(route["results"])) for route in tried] == [("segment", 2), ("mask", 2)]
    for route in tried:
        for result in route["results"]:
            assert 0 <= result["error"] <= result["tolerance"] < 1e-4
            assert result["passed"]
    assert "pip install flash-attn" in report["routes"][0]["reasons"]


def test_check_says_how_a_model_trains_and_what_would_be_faster(capsys, model_dir):
    assert main(["check", model_dir, "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM on cpu, bfloat16, sdpa" in printed
    assert "Trains as segment" in printed
    assert "the kernel needs CUDA" in printed


def test_check_exits_1_for_a_model_that_mixes_sequences(capsys, roberta_dir):
    code, report = json_of(capsys, "check", roberta_dir)
    assert code == 1
    assert not report["passed"]
    assert report["chosen"] is None
    assert "does not treat a flat batch as separate sequences" in report["refusal"]
    assert main(["check", roberta_dir]) == 1
    assert "Refused." in capsys.readouterr().out


def test_env_names_versions_and_attention(capsys):
    code, found = json_of(capsys, "env")
    assert code == 0
    assert found["packages"]["trl-paddingfree"] == trl_paddingfree.__version__
    assert {"torch", "transformers", "trl", "flash-attn"} <= found["packages"].keys()
    assert found["attention"]["segment"] == "yes"
    assert main(["env"]) == 0
    assert f"- trl-paddingfree: {trl_paddingfree.__version__}\n" in capsys.readouterr().out


NAMED = ["--model_name_or_path", "org/model", "--dataset_name", "org/data"]


@pytest.mark.parametrize("script", ["dpo", "sft"])
def test_launch_options_go_to_accelerate_and_all_to_the_script(launched, tmp_path, script):
    config = tmp_path / "config.yaml"
    config.write_text("num_machines: 1\nmax_length: 99\nmodel_name_or_path: org/model\ndataset_name: org/data\n")
    given = f"--num_processes 2 --config {config} --mixed_precision bf16 --seed 2 --prefix_sharing false"
    options = [*given.split(), *ON_CPU]
    assert main([script, *options]) == 0
    (args,) = launched
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (2, 1, "bf16")
    assert args.module
    assert args.training_script == "trl_paddingfree.cli.launched"
    assert args.training_script_args[0] == script
    assert sorted(args.training_script_args) == sorted([script, *options])
    assert args.training_script_args[-2:] == ["--config", str(config)]  # where TRL looks for it


def test_accelerate_config_names_one_of_trls(launched):
    argv = [*["dpo", "--accelerate_config", "zero2", "--beta", "0.2"], *NAMED, *ON_CPU]
    assert main(argv) == 0
    (args,) = launched
    assert args.config_file.endswith("zero2.yaml")
    assert sorted(args.training_script_args) == sorted(argv)


def test_files_are_named_in_every_spelling_and_the_command_line_has_the_last_word(launched, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("accelerate_config: zero2\nmodel_name_or_path: org/model\ndataset_name: org/data\n")
    assert main(["dpo", f"--config={config}", "--accelerate-config=fsdp2", *ON_CPU]) == 0
    (args,) = launched
    assert args.config_file.endswith("fsdp2.yaml")
    files = ["--config", str(config), "--accelerate_config", "fsdp2"]
    assert args.training_script_args == ["dpo", *ON_CPU, *files]


def test_a_mixture_is_split_alike_in_every_process(tmp_path):
    """TRL splits without a seed of its own, and nothing seeds numpy before a trainer is made."""
    prompt_completions(40, seed=5).to_json(tmp_path / "rows.jsonl")
    splits = []
    for state in range(2):
        np.random.seed(state)
        source = {"path": "json", "data_files": str(tmp_path / "rows.jsonl")}
        mixture = DatasetMixtureConfig([source], test_split_size=0.25)
        splits.append([*load_data(ScriptArguments(), mixture, seed=3)["test"]["prompt"]])
    assert len(splits[0]) == 10
    assert splits[0] == splits[1]


def test_models_are_looked_for_in_their_own_revision(launched, monkeypatch, pairs_file):
    """The cache of the hub may hold no other."""
    seen = []
    monkeypatch.setattr("trl_paddingfree.cli.train.refuse_unreachable", lambda *given: seen.append(given))
    models = ["--model_name_or_path", "org/student", "--model_revision", "v2", "--dataset_name", pairs_file]
    teacher = ["--teacher_model_name_or_path", "org/teacher", "--teacher_model_revision", "v3"]
    main(["distillation", *models, *teacher, "--output_dir", "out"])
    assert [(name, revision) for name, _, revision in seen] == [("org/student", "v2"), ("org/teacher", "v3")]


def test_options_that_a_script_refuses_exit_2_with_one_message(capsys, launched):
    assert main(["dpo", "--accelerate_config", "no-such-config", *NAMED, *ON_CPU]) == 2
    assert "trl-paddingfree dpo: Accelerate config no-such-config is neither a file" in capsys.readouterr().err
    assert launched == []


def test_a_script_that_fails_gives_its_exit_code(monkeypatch, launched):
    def fail(args):
        raise subprocess.CalledProcessError(7, ["python"])

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert main(["sft", *NAMED, *ON_CPU]) == 7


def test_a_run_that_is_over_can_be_resumed_and_is_saved_again(capsys, tmp_path, pairs_file, model_dir):
    out = tmp_path / "out"
    argv = f"--model_name_or_path {model_dir} --dataset_name {pairs_file} --output_dir {out} --max_steps 1".split()
    argv += [*ON_CPU, "--report_to", "none"]
    run_script("dpo", argv)
    (out / "model.safetensors").unlink()
    run_script("dpo", [*argv, "--resume_from_checkpoint", "true"])
    assert (out / "model.safetensors").exists()
    assert "tokens computed" in capsys.readouterr().out


@pytest.mark.slow
def test_dpo_trains_and_saves_a_model(tmp_path, pairs_file, model_dir):
    config = tmp_path / "options.yaml"  # of the script, and of `accelerate launch`
    config.write_text("learning_rate: 1.0e-4\nnum_machines: 1\n")
    options = f"--model_name_or_path {model_dir} --dataset_name {pairs_file} --output_dir {tmp_path}/out --max_steps 1"
    options += f" --report_to none --save_strategy no --config {config} --num_processes 1"
    result = finished([sys.executable, "-m", "trl_paddingfree", "dpo", *options.split(), *ON_CPU], 300)
    assert "Trained by padding-free (segment, shared prefixes)" in result.stdout
    rows = (
        "mean loss of the run",
        "tokens computed",
        "with padding, these would be",
        "share computed",
        "fewest possible",
    )
    assert all(row in result.stdout for row in rows)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert result.stderr.count("Padding-free, segment: sdpa over segments of like shape, shared prefixes: exact") == 1
    for noise in ("FutureWarning", "temporarily unavailable", "Traceback", "gemm_4bit", "had defaults used instead"):
        assert noise not in result.stderr


def test_the_figures_and_the_card_of_a_run_name_the_method(tmp_path):
    trainer = run("dpo", "shared", output_dir=str(tmp_path), steps=1).trainer
    figures = trainer.state.log_history[0]
    assert 0 < figures["flat/saved_by_padding_free"] < 1
    assert 0 < figures["flat/saved_by_sharing"] < 1
    assert figures["flat/tokens_per_second"] > 0
    assert 0.05 < figures["flat/peak_memory_gib"] < 64  # a process with PyTorch in it
    trainer.create_model_card(tags="mine")
    card = (tmp_path / "README.md").read_text()
    counts = trainer.total_counts()
    assert f"{trl_paddingfree.__version__} computed the batches: padding-free (segment, shared prefixes)." in card
    assert f"computed {counts.computed / counts.padded:.0%} of their slots. Cite it as:" in card
    assert "- padding-free\n" in card
    assert "- mine\n" in card
    assert "Cite DPO as" in card
