"""What a user reads when a command cannot go on: one line, and no traceback."""

import importlib
import os
import subprocess
import sys

import pytest

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
