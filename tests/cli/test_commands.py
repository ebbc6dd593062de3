"""The command line, as a user types it: results, exit codes, and messages that say what to change."""

import json
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DatasetMixtureConfig, DPOConfig, DPOTrainer, ScriptArguments, SFTConfig, SFTTrainer

import trl_paddingfree
from tests.helpers.tiny import conversations, make_model, make_tokenizer, preference_data, prompt_completions, text
from trl_paddingfree import (
    PaddingFreeDPOConfig,
    PaddingFreeDPOTrainer,
    PaddingFreeOptions,
    PaddingFreeSFTConfig,
    PaddingFreeSFTTrainer,
)
from trl_paddingfree.cli.main import main
from trl_paddingfree.cli.train import main as run_script
from trl_paddingfree.data.load import load_data

TRAINING = ["dpo", "sft", "reward", "kto", "grpo", "rloo", "distillation"]
COMMANDS = ["inspect", "check", *TRAINING, "env", "quickstart"]
PNG = b"\x89PNG"
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
QUIET = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "dataloader_pin_memory": False}


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    preference_data(30, seed=5).to_json(path)
    return str(path)


@pytest.fixture(scope="module")
def roberta_dir(tmp_path_factory):
    """A model that no route keeps from mixing sequences."""
    folder = tmp_path_factory.mktemp("roberta")
    make_model("roberta").save_pretrained(folder)
    return str(folder)


def json_of(capsys, *argv: str):
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


@pytest.mark.slow
def test_python_m_is_the_same_command():
    result = subprocess.run([sys.executable, "-m", "trl_paddingfree", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: trl-paddingfree")


def trained_counts(trainer_class, config_class, dataset, output_dir, **options):
    """What one batch of all rows counts in training."""
    args = config_class(output_dir, per_device_train_batch_size=len(dataset), max_steps=1, **QUIET, **options)
    trainer = trainer_class(
        make_model(), args=args, train_dataset=dataset, processing_class=make_tokenizer(), peft_config=LoraConfig()
    )
    trainer.train()
    return trainer.total_counts()


@pytest.mark.parametrize("conversational", [True, False], ids=["messages", "text"])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_inspect_counts_of_pairs_are_those_of_training(capsys, tmp_path, model_dir, conversational, mode):
    data, path = preference_data(30, 7, conversational), tmp_path / "pairs.jsonl"
    data.to_json(path)
    options = ["--batch_size", "30", "--max_length", "24", "--truncation_mode", mode]
    code, report = json_of(capsys, "inspect", str(path), "--tokenizer", model_dir, *options)
    counts = trained_counts(
        PaddingFreeDPOTrainer, PaddingFreeDPOConfig, data, str(tmp_path), max_length=24, truncation_mode=mode
    )
    (row,) = report["batch_sizes"]
    assert code == 0
    assert report["task"] == "dpo"
    assert (row["computed_tokens"], row["real_tokens"], row["padded_slots"]) == counts.as_tuple()[:3]
    assert row["predicted_speed_up_with_sharing"] == counts.padded / counts.computed
    assert row["wasted_by_padding"] == 1 - counts.real / counts.padded > 0
    assert row["saved_by_sharing"] == 1 - counts.computed / counts.real > 0


@pytest.mark.parametrize("make_data", [conversations, prompt_completions])
def test_inspect_counts_of_instructions_are_those_of_training(capsys, tmp_path, model_dir, make_data):
    data, path = make_data(20, 3), tmp_path / "rows.jsonl"
    data.to_json(path)
    options = ["--batch_size", "20", "--max_length", "24"]
    _, report = json_of(capsys, "inspect", str(path), "--tokenizer", model_dir, *options)
    counts = trained_counts(
        PaddingFreeSFTTrainer, PaddingFreeSFTConfig, data, str(tmp_path), max_length=24, prefix_sharing=True
    )
    (row,) = report["batch_sizes"]
    assert report["task"] == "sft"
    assert (row["computed_tokens"], row["real_tokens"], row["padded_slots"]) == counts.as_tuple()[:3]


def test_inspect_finds_the_pairs_that_trl_truncates_and_drops(capsys, tmp_path, pairs_file, model_dir):
    options = ["--tokenizer", model_dir, "--max_length", "16"]
    _, report = json_of(capsys, "inspect", pairs_file, *options)
    _, whole = json_of(capsys, "inspect", pairs_file, "--tokenizer", model_dir, "--max_length", "0")
    data = Dataset.from_json(pairs_file)
    kwargs = {"train_dataset": data, "processing_class": make_tokenizer(), "peft_config": LoraConfig()}
    trainer = DPOTrainer(make_model(), args=DPOConfig(str(tmp_path), max_length=16, **QUIET), **kwargs)
    kept = trainer.train_dataset
    cut = sum(len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) > 16 for row in kept)
    assert report["num_dropped"] == len(data) - len(kept) > 0
    assert report["num_truncated"] == cut > 0
    assert (whole["num_dropped"], whole["num_truncated"], whole["max_length"]) == (0, 0, None)
    assert whole["lengths"] == report["lengths"]
    assert whole["lengths"]["max"] > 16


def test_inspect_finds_the_rows_that_trl_drops_from_instructions(capsys, tmp_path, model_dir):
    data, path = prompt_completions(20, 4), tmp_path / "rows.jsonl"
    data.to_json(path)
    _, report = json_of(capsys, "inspect", str(path), "--tokenizer", model_dir, "--max_length", "8")
    whole, cut = (
        SFTTrainer(
            make_model(),
            args=SFTConfig(str(tmp_path), max_length=max_length, **QUIET),
            train_dataset=data,
            processing_class=make_tokenizer(),
        ).train_dataset["input_ids"]
        for max_length in (None, 8)
    )
    assert report["num_dropped"] == len(whole) - len(cut) > 0
    assert report["num_truncated"] == sum(len(ids) > 8 for ids in whole) - report["num_dropped"] > 0


def test_inspect_draws_the_same_sample_for_the_same_seed(capsys, pairs_file, model_dir):
    options = ["--tokenizer", model_dir, "--batch_size", "2", "--sample", "12"]
    reports = [json_of(capsys, "inspect", pairs_file, *options, "--seed", seed)[1] for seed in ("1", "1", "2")]
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


WRONG = {
    "no data": (["inspect", "nowhere/nothing", "--tokenizer", "MODEL"], "'nowhere/nothing' is no file or folder here"),
    "no tokenizer": (["inspect", "PAIRS", "--tokenizer", "nowhere"], "'nowhere' is no file or folder here"),
    "no model": (["check", "nowhere"], "'nowhere' is no file or folder here"),
    "unknown columns": (["inspect", "ODD", "--tokenizer", "MODEL"], "Preference data needs 'chosen' and 'rejected'"),
    "no split": (
        ["inspect", "PAIRS", "--tokenizer", "MODEL", "--dataset_train_split", "dev"],
        "it has ['train']: name one with `--dataset_train_split`",
    ),
    "a prompt without completion": (
        ["inspect", "PROMPTS", "--tokenizer", "MODEL"],
        "or, without a `prompt`, one of",
    ),
    "no text": (["inspect", "NULLS", "--tokenizer", "MODEL"], "Row 1 of the inspected data: `text` is None"),
    "no batch": (["inspect", "PAIRS", "--tokenizer", "MODEL", "--batch_size", "0"], "`--batch_size 0` must be"),
    "nothing left": (["inspect", "PAIRS", "--tokenizer", "MODEL", "--max_length", "1"], "Raise `max_length`"),
    "no kind of file": (["inspect", "TEXT", "--tokenizer", "MODEL"], "name a file that does"),
    "no flash-attn": (["check", "MODEL", "--attn_implementation", "flash_attention_2"], "FlashAttention2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_done_exits_2_with_one_message(capsys, tmp_path, pairs_file, model_dir, case):
    argv, message = WRONG[case]
    files = {"PAIRS": pairs_file, "MODEL": model_dir}
    files["ODD"] = str(tmp_path / "ODD.jsonl")
    Dataset.from_dict({"a": ["b"]}).to_json(files["ODD"])
    files |= {name: str(tmp_path / f"{name}.jsonl") for name in ("PROMPTS", "NULLS")}
    Dataset.from_dict({"prompt": ["b"], "text": ["c"]}).to_json(files["PROMPTS"])
    Dataset.from_dict({"text": ["c", None]}).to_json(files["NULLS"])
    files["TEXT"] = str(tmp_path / "notes.txt")
    (tmp_path / "notes.txt").write_text("a")
    assert main([files.get(x, x) for x in argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"trl-paddingfree {argv[0]}: " in printed.err
    assert message in printed.err
    assert "Traceback" not in printed.err
    with pytest.raises((ValueError, OSError, ImportError)):
        main([files.get(x, x) for x in argv] + ["--traceback"])


def test_unknown_arguments_exit_2(capsys):
    for argv in ([], ["no-such-command"], ["inspect"], ["env", "--nonsense"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
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


@pytest.fixture
def launched(monkeypatch):
    """The arguments that `accelerate launch` would run with."""
    found = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", found.append)
    return found


@pytest.mark.parametrize("script", ["dpo", "sft"])
def test_launch_options_go_to_accelerate_and_all_to_the_script(launched, tmp_path, script):
    config = tmp_path / "config.yaml"
    config.write_text("num_machines: 1\nmax_length: 99\nmodel_name_or_path: org/model\ndataset_name: org/data\n")
    options = ["--num_processes", "2", "--config", str(config), "--mixed_precision", "bf16"]
    options += ["--seed", "2", "--prefix_sharing", "false", *ON_CPU]
    assert main([script, *options]) == 0
    (args,) = launched
    assert (args.num_processes, args.num_machines, args.mixed_precision) == (2, 1, "bf16")
    assert args.module
    assert args.training_script == "trl_paddingfree.cli.train"
    assert args.training_script_args[0] == script
    assert sorted(args.training_script_args) == sorted([script, *options])
    assert args.training_script_args[-2:] == ["--config", str(config)]  # where TRL looks for it


def test_accelerate_config_names_one_of_trls(launched):
    argv = ["dpo", "--accelerate_config", "zero2", "--beta", "0.2", *NAMED, *ON_CPU]
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


def test_options_that_a_script_refuses_exit_2_with_one_message(capsys, launched):
    assert main(["dpo", "--accelerate_config", "no-such-config", *NAMED, *ON_CPU]) == 2
    assert "trl-paddingfree dpo: Accelerate config no-such-config is neither a file" in capsys.readouterr().err
    assert launched == []


def test_a_script_that_fails_gives_its_exit_code(monkeypatch):
    def fail(args):
        raise subprocess.CalledProcessError(7, ["python"])

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert main(["sft", *NAMED, *ON_CPU]) == 7


def test_a_run_that_is_over_can_be_resumed_and_is_saved_again(capsys, tmp_path, pairs_file, model_dir):
    out = tmp_path / "out"
    argv = ["--model_name_or_path", model_dir, "--dataset_name", pairs_file, "--output_dir", str(out), *ON_CPU]
    argv += ["--max_steps", "1", "--report_to", "none"]
    run_script("dpo", argv)
    (out / "model.safetensors").unlink()
    run_script("dpo", [*argv, "--resume_from_checkpoint", "true"])
    assert (out / "model.safetensors").exists()
    assert "tokens computed" in capsys.readouterr().out


@pytest.mark.slow
def test_dpo_trains_and_saves_a_model(tmp_path, pairs_file, model_dir):
    options = {
        "model_name_or_path": model_dir,
        "dataset_name": pairs_file,
        "output_dir": str(tmp_path / "out"),
        "max_steps": "1",
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "save_strategy": "no",
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", value)]
    config = tmp_path / "options.yaml"  # of the script, and of `accelerate launch`
    config.write_text("learning_rate: 1.0e-4\nnum_machines: 1\n")
    argv += ["--config", str(config), "--num_processes", "1"]
    command = [sys.executable, "-m", "trl_paddingfree", "dpo", *argv]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "Trained by padding-free (segment, shared prefixes)" in result.stdout
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert result.stderr.count("Padding-free, segment: sdpa over segments of like shape, shared prefixes: exact") == 1
    for noise in ("FutureWarning", "temporarily unavailable", "Traceback", "gemm_4bit", "had defaults used instead"):
        assert noise not in result.stderr


def test_the_figures_and_the_card_of_a_run_name_the_method(tmp_path):
    args = PaddingFreeDPOConfig(str(tmp_path), max_steps=1, logging_steps=1, **QUIET)
    kwargs = {"train_dataset": preference_data(8, 1), "processing_class": make_tokenizer()}
    trainer = PaddingFreeDPOTrainer(make_model(), args=args, peft_config=LoraConfig(), **kwargs)
    trainer.train()
    figures = trainer.state.log_history[0]
    assert 0 < figures["flat/saved_by_padding_free"] < 1
    assert 0 < figures["flat/saved_by_sharing"] < 1
    assert figures["flat/tokens_per_second"] > 0
    assert 0.05 < figures["flat/peak_memory_gib"] < 64  # a process with PyTorch in it
    trainer.create_model_card(tags="mine")
    card = (tmp_path / "README.md").read_text()
    counts = trainer.total_counts()
    assert f"{trl_paddingfree.__version__} computed the batches: padding-free (segment, shared prefixes)." in card
    assert f"{counts.computed / counts.padded:.0%}. Cite it as:" in card
    assert "- padding-free\n" in card
    assert "- mine\n" in card
    assert "Cite DPO as" in card


def test_words_come_back_from_a_file_of_texts(capsys, tmp_path, model_dir):
    import random

    path, rng = tmp_path / "texts.jsonl", random.Random(0)
    rows = [text(rng, 1, 9) for _ in range(6)]
    Dataset.from_dict({"text": rows}).to_json(path)
    _, report = json_of(capsys, "inspect", str(path), "--tokenizer", model_dir, "--batch_size", "6")
    assert report["batch_sizes"][0]["real_tokens"] == sum(len(row.split()) + 1 for row in rows)  # and an EOS each
