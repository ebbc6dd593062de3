"""What a user reads when a command cannot go on: one line, and no traceback."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from accelerate.commands import launch as accelerate_launch
from datasets import Dataset

from tests.helpers.tiny import preference_data

cli = importlib.import_module("trl_paddingfree.cli.main")  # the package gives its function by this name


def raising(error):
    def run(args):
        raise error

    return run


def test_ctrl_c_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(cli, "env", raising(KeyboardInterrupt()))
    assert cli.main(["env"]) == 130
    assert capsys.readouterr().err == "trl-paddingfree: interrupted\n"


@pytest.mark.slow
def test_ctrl_c_in_a_training_script_says_nothing_twice():
    code = (
        "import runpy, sys, trl; sys.argv = ['train', 'sft']\n"
        "def interrupt(*args, **kwargs): raise KeyboardInterrupt\n"
        "trl.TrlParser.parse_args_and_config = interrupt\n"
        "runpy.run_module('trl_paddingfree.cli.train', run_name='__main__')"
    )
    script = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert script.returncode == 130
    assert "Traceback" not in script.stderr


@pytest.mark.slow
def test_a_closed_pipe_ends_the_command_quietly():
    code = (
        "import importlib, sys; cli = importlib.import_module('trl_paddingfree.cli.main')\n"
        "def run(args):\n    sys.stdin.read()\n    print('x' * 100000)\n"
        "cli.env = run; sys.exit(cli.main(['env']))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    process.stdout.close()  # before anything is printed
    process.stdin.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert "Broken pipe" not in error
    assert "BrokenPipe" not in error


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv"])
def test_an_empty_file_is_named(capsys, tmp_path, model_dir, name):
    (tmp_path / name).write_text("")
    assert cli.main(["inspect", str(tmp_path / name), "--tokenizer", model_dir]) == 2
    assert f"{name} is an empty file" in capsys.readouterr().err.replace("`", "")


def test_a_broken_configuration_file_is_refused_where_it_breaks(capsys, tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_text("beta: [1\nb: }")
    assert cli.main(["dpo", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-paddingfree dpo: the file of `--config` is no YAML: while parsing")
    assert f'in "{file}", line 2' in error


def test_the_rows_of_a_file_are_still_read(capsys, tmp_path, model_dir):
    file = tmp_path / "pairs.jsonl"
    preference_data(4, int(os.environ["TRL_PADDINGFREE_SEED"])).to_json(file)
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir, "--plot", "", "--json"]) == 0


@pytest.mark.parametrize("spelling", ["--batch_size", "--batch-size"])
def test_options_may_be_spelt_with_either_dash(capsys, tmp_path, model_dir, spelling):
    file = tmp_path / "pairs.jsonl"
    preference_data(4, int(os.environ["TRL_PADDINGFREE_SEED"])).to_json(file)
    argv = ["inspect", str(file), "--tokenizer", model_dir, f"{spelling}=2", "--plot", "", "--json"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["batch_sizes"][0]["batch_size"] == 2


def test_an_unknown_option_is_answered_with_the_options_of_the_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["inspect", "pairs.jsonl", "--tokenizer", "model", "--batchsize", "8"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("usage: trl-paddingfree inspect")
    assert "unrecognized arguments: --batchsize 8" in error


MISSING = {
    "no model": (["--dataset_name", "PAIRS"], "Name the model"),
    "no data": (["--model_name_or_path", "MODEL"], "Name the data"),
    "no such file": (
        ["--model_name_or_path", "MODEL", "--dataset_name", "pair.jsonl"],
        "'pair.jsonl' is no file or folder here",
    ),
    "no such folder": (
        ["--model_name_or_path", "./model", "--dataset_name", "PAIRS"],
        "'./model' is no file or folder here",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_a_run_lacks_is_said_before_it_is_launched(capsys, monkeypatch, tmp_path, model_dir, case):
    launched = []
    monkeypatch.setattr(accelerate_launch, "launch_command", launched.append)
    file = tmp_path / "pairs.jsonl"
    preference_data(4, int(os.environ["TRL_PADDINGFREE_SEED"])).to_json(file)
    short = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    argv, message = MISSING[case]
    assert cli.main(["dpo", *short, *({"PAIRS": str(file), "MODEL": model_dir}.get(x, x) for x in argv)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-paddingfree dpo: ")
    assert message in error
    assert launched == []


def test_a_missing_file_is_not_looked_for_on_the_hub(capsys, model_dir):
    assert cli.main(["inspect", "pair.jsonl", "--tokenizer", model_dir]) == 2
    error = capsys.readouterr().err
    assert error == "trl-paddingfree inspect: 'pair.jsonl' is no file or folder here: is it misspelt?\n"


def test_images_need_a_model_that_sees_them(capsys, tmp_path, model_dir):
    file = tmp_path / "images.jsonl"
    file.write_text('{"image": "a.png", "prompt": "a", "completion": "b"}\n')
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir]) == 2
    error = capsys.readouterr().err
    assert f"The data has images, and {model_dir!r} is no model that reads them" in error


def test_every_head_of_the_table_fits_into_a_terminal(capsys, monkeypatch, tmp_path, model_dir):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "prompts.jsonl"
    data = preference_data(64, int(os.environ["TRL_PADDINGFREE_SEED"])).select_columns("prompt")
    data.to_json(file)
    arguments = ["--max_completion_length", "512", "--batch_size", "8", "--plot", ""]
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir, *arguments]) == 0
    printed = capsys.readouterr().out
    heads = {"slots", "tokens", "computed", "padding", "shared", "speed-up"}
    assert heads <= set(printed.partition("\n")[2].split("┡")[0].replace("┃", " ").split())
    assert "Tokens per prompt: " in printed


def test_what_truncation_does_is_said_of_one_and_of_many(capsys, tmp_path, model_dir):
    file = tmp_path / "pairs.jsonl"
    pair = {"prompt": "w1", "chosen": "w2 w3 w4 w5 w6 w7 w8 w9", "rejected": "w2"}
    Dataset.from_list([pair, {**pair, "chosen": "w3"}]).to_json(file)
    arguments = ["--max_length", "5", "--plot", ""]
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir, *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "max_length 5 truncates 1 of 2 pairs and drops 0, which would have nothing left to learn from." in printed
