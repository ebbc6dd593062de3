"""What a user reads when a command cannot go on: one line, and no traceback."""

import gzip
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from datasets import Dataset

import trl_paddingfree
from tests.helpers.tiny import SEED, preference_data
from trl_paddingfree import UnprovenModelError
from trl_paddingfree.cli.options import TRAINING, OneLineParser, refuse_misspelt, spelled
from trl_paddingfree.cli.train import _load_reward, make_parser
from trl_paddingfree.cli.train import main as run_script
from trl_paddingfree.data_checks.validate import refuse_unread_instructions

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(trl_paddingfree.__file__).parents[1])}
cli = importlib.import_module("trl_paddingfree.cli.main")  # the package gives its function by this name


def raising(error):
    def run(args):
        raise error

    return run


def test_ctrl_c_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(cli, "env", raising(KeyboardInterrupt()))
    assert cli.main(["env"]) == 130
    assert capsys.readouterr().err == "trl-paddingfree: interrupted\n"


@pytest.mark.parametrize("during", ["trl.TrlParser.parse_args_and_config", "builtins.__import__"])
def test_ctrl_c_in_a_training_script_says_nothing_twice(during):
    """While it trains, and while it imports."""
    code = (
        "import builtins, pkgutil, runpy, sys; sys.argv = ['train', 'sft']\n"
        "def interrupt(name, *args, importing=builtins.__import__, **kwargs):\n"
        "    if not isinstance(name, str) or name == 'torch': raise KeyboardInterrupt\n"
        "    return importing(name, *args, **kwargs)\n"
        f"*path, name = {during!r}.split('.')\n"
        "setattr(pkgutil.resolve_name('.'.join(path)), name, interrupt)\n"
        "runpy.run_module('trl_paddingfree.cli.launched', run_name='__main__')"
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


# What is written to a file, the arguments that name it, and what is said; WHERE is the file
BROKEN = {
    "config": ("beta: [1\nb: }", ["--config", "WHERE"], "not valid YAML: ", "WHERE", "line 2, column 2"),
    "a list": ("- a", ["--config", "WHERE"], "Config file WHERE must contain a YAML mapping"),
    "no config": (None, ["--config", "WHERE"], "No such file or directory: 'WHERE'"),
    "option": (
        None,
        ["--model_init_kwargs", '{"a":}'],
        '{"a":} is not valid JSON: line 1, column 6: Expecting value.',
    ),
    "other quotes": (None, ["--lr-scheduler-kwargs={'a': 1}"], "{'a': 1} is not valid JSON: line 1, column 2"),
    "in config": (
        "model_init_kwargs: '{\"a\":}'",
        ["--config", "WHERE"],
        '{"a":} is not valid JSON: line 1, column 6',
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_json_or_yaml_is_named_with_the_line(capsys, tmp_path, case):
    written, argv, *messages = BROKEN[case]
    file = str(tmp_path / "broken")
    argv = [argument.replace("WHERE", file) for argument in argv]
    if written is not None:
        Path(file).write_text(written)
    argv += NAMED
    assert cli.main(["dpo", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-paddingfree dpo: ")
    assert error.count("\n") == 1
    assert all(message.replace("WHERE", file) in error for message in messages)
    with pytest.raises(SystemExit):  # as the launched script, too
        run_script("dpo", argv)
    assert messages[0].replace("WHERE", file) in capsys.readouterr().err


@pytest.mark.parametrize("while_training", [False, True])
def test_a_model_that_is_refused_ends_the_command_with_2(capsys, monkeypatch, while_training):
    """Before the first step, when its weights come late, or by a look at a batch."""
    names = ["make_trainer", "train"]
    for name in names:
        monkeypatch.setattr(f"trl_paddingfree.cli.train.{name}", lambda *args: None)
    monkeypatch.setattr("trl_paddingfree.cli.train.look_ahead", lambda parsed: None)
    unproven = raising(UnprovenModelError("rows are not independent"))
    monkeypatch.setattr(f"trl_paddingfree.cli.train.{names[while_training]}", lambda *args: unproven(args))
    with pytest.raises(SystemExit, match="^2$"):
        run_script("dpo", NAMED)
    assert capsys.readouterr().err.endswith("trl-paddingfree dpo: rows are not independent\n")
    with pytest.raises(UnprovenModelError):
        run_script("dpo", [*NAMED, "--traceback"])


ROWS = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
DATA = {
    "rows.jsonl": (f"{ROWS}\n{ROWS[:-5]}\n{ROWS}\n", "line 2, column"),
    "rows.jsonl.gz": (f"{ROWS}\n\n{ROWS}\nx\n", "line 4, column 1"),
    "first.jsonl": (f"{ROWS[:-5]}\n{ROWS}\n", "line 1, column"),
    "list.json": (f"[\n{ROWS},\n{ROWS[:14]}]", "line 3, column"),
}


@pytest.mark.parametrize("name", DATA)
def test_a_file_of_rows_that_is_no_json_is_named_with_the_line(capsys, tmp_path, model_dir, name):
    written, place = DATA[name]
    file = tmp_path / name
    file.write_bytes(gzip.compress(written.encode()) if name.endswith(".gz") else written.encode())
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir]) == 2
    error = capsys.readouterr().err
    assert f"'{file}' cannot be read: {place}" in error
    assert " is not valid JSON: " in error


@pytest.mark.parametrize("spelling", ["--batch_size", "--batch-size"])
def test_options_may_be_spelt_with_either_dash(inspected, pairs_file, spelling):
    assert inspected(pairs_file, f"{spelling}=2")["batch_sizes"][0]["batch_size"] == 2


MISSPELT = {
    "inspct": ("trl-paddingfree: argument COMMAND: invalid choice: 'inspct'", "inspect"),
    "inspect pairs.jsonl --tokenizer model --batchsize 8": (
        "trl-paddingfree inspect: unrecognized arguments: --batchsize 8.",
        "--batch_size",
    ),
    "check model --dtype float31": ("argument --dtype: invalid choice: 'float31'", "float32"),
    "dpo --bata 0.2": ("trl-paddingfree dpo: unrecognized arguments: --bata.", "--beta"),
    "sft --padding-fee=true": ("unrecognized arguments: --padding_fee=true.", "--padding_free"),
    "dpo --num_proceses 2": ("unrecognized arguments: --num_proceses", "--num_processes"),
    "dpo --lr_scheduler_type cosin": ("invalid choice: 'cosin'", "cosine"),
    "dpo --loss_type sigmoi": ("invalid choice: 'sigmoi'", "sigmoid"),
}
NAMED = ["--model_name_or_path", "org/model", "--dataset_name", "org/data"]


@pytest.mark.parametrize("command", MISSPELT)
def test_what_is_misspelt_is_answered_in_one_line_with_what_was_meant(capsys, command):
    message, meant = MISSPELT[command]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split(), *(NAMED if command.startswith(("dpo", "sft")) else [])])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in printed.err
    assert printed.err.endswith(f" Did you mean `{meant}`?\n")
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.parametrize(
    ("name", "wrong", "meant"), [("batch_method", "paddin", "padding"), ("loss_type", "nl", "nll")]
)
def test_a_word_of_a_file_that_an_option_does_not_allow_is_refused_as_on_the_command_line(
    capsys, tmp_path, name, wrong, meant
):
    (tmp_path / "options.yaml").write_text(f"{name}: {wrong}")
    with pytest.raises(SystemExit):
        cli.main(["sft", "--config", str(tmp_path / "options.yaml"), *NAMED])
    assert f"invalid choice: {wrong!r} (choose from " in (error := capsys.readouterr().err)
    assert error.endswith(f" Did you mean `{meant}`?\n")


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy", "mixed_precision"])
def test_a_bare_no_in_a_file_is_named_with_the_quotes_that_it_lacks(capsys, tmp_path, launched, name):
    """YAML reads it as False; `mixed_precision` is an option of the launcher."""
    (tmp_path / "options.yaml").write_text(f"{name}: no")
    with pytest.raises(SystemExit):
        cli.main(["sft", "--config", str(tmp_path / "options.yaml"), *NAMED])
    error = capsys.readouterr().err
    assert f"argument --{name}" in error
    assert error.endswith(f'YAML reads a bare `no` as False and `yes` as True: write `{name}: "no"`, in quotes.\n')
    assert error.count("\n") == 1
    assert launched == []


def test_words_that_are_true_or_false_to_yaml_are_taken_where_an_option_is(launched, tmp_path):
    (tmp_path / "options.yaml").write_text("bf16: no\nuse_cpu: yes\nsave_strategy: 'no'\nresume_from_checkpoint: false")
    assert cli.main(["sft", "--config", str(tmp_path / "options.yaml"), *NAMED]) == 0
    assert len(launched) == 1


def test_options_that_are_answered_before_trl_is_imported_are_none_of_its_own(capsys):
    """Every option of every command is mentioned in the sources that are read, and so are those of the launcher."""
    from accelerate.commands.launch import launch_command_parser

    parsers = [make_parser(task) for task in TRAINING]
    for parser in (*parsers, launch_command_parser()):
        refuse_misspelt(
            OneLineParser(), [spelled([name])[0] for action in parser._actions for name in action.option_strings]
        )


def test_a_hub_that_cannot_be_reached_is_said_at_once_with_the_name_that_is_asked_for(capsys, monkeypatch, model_dir):
    """The hub's own client tries each of several files for half a minute, and then names none."""

    def unreachable(address, timeout):
        raise OSError("Name or service not known")

    monkeypatch.setattr("trl_paddingfree.hub.create_connection", unreachable)
    monkeypatch.setattr("trl_paddingfree.hub.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for command, named in (
        (["dpo", "--model_name_or_path", "smolm2"], "`--model_name_or_path smolm2`"),
        (["grpo", *NAMED, "--reward_model_name_or_path", "smolm2"], "`--model_name_or_path org/model`"),
        (["check", "smolm2"], "'smolm2'"),
        (["dpo", "--model_name_or_path", model_dir], "`--dataset_name org/data`"),
        (["inspect", "org/data", "--tokenizer", model_dir], "'org/data'"),
    ):
        trains = command[0] in ("dpo", "grpo")
        data = ["--dataset_name", "org/data", "--use_cpu", "true", "--bf16", "false"] if trains else []
        assert cli.main([*command, *data]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(
            f"trl-paddingfree {command[0]}: {named} is not a file or folder here, nor in the cache of the hub, and "
        )
        assert error.endswith("cannot be reached (Name or service not known).")


def test_a_word_that_is_no_option_is_not_taken_for_a_script_to_launch(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dpo", "word", *NAMED])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "trl-paddingfree dpo: unrecognized arguments: word. `trl-paddingfree dpo --help` lists all.\n"
    )


def test_a_script_that_is_not_launched_knows_its_own_options_only(capsys):
    for option, said in (("--max_stepps", ". Did you mean `--max_steps`?"), ("--num_processes", " 8. ")):
        with pytest.raises(SystemExit) as stopped:
            run_script("dpo", [*NAMED, option, "8"])
        assert stopped.value.code == 2
        assert f"unrecognized arguments: {option}{said}" in capsys.readouterr().err


# Answers that need nothing but the arguments
AT_ONCE = [
    "--help",
    "",
    "inspct",
    "inspect --help",
    "inspect a.jsonl --tokenizer b",
    "inspect a --tokenizer b --batch_size 0",
    "check ./nowhere",
    "quickstart --steps x",
    "env --nonsense",
    "dpo --config",
    "sft --config=broken.yaml",
    "dpo --model_name_or_path a",
    "dpo --model-name-or-path=./a --dataset_name b",
    "grpo --model_name_or_path a --dataset_name b",
    "rloo --config named.yaml",
    "distillation --config named.yaml",
    "dpo --bata 0.2 --model_name_or_path org/a --dataset_name org/b",
    "sft --config misspelt.yaml --model_name_or_path org/a --dataset_name org/b",
]
IMPORTED = """
import json, sys
from trl_paddingfree.cli import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as stopped:
    code = stopped.code
found = {"torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy"} & sys.modules.keys()
print(json.dumps([code, sorted(found)]))
"""


def imported_by(command, folder):
    """The exit code of a command in a folder, the large packages that it imports, and what it says."""
    argv = [sys.executable, "-c", IMPORTED, json.dumps(command.split())]
    result = subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, check=True)
    return *json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.parametrize("command", AT_ONCE)
def test_what_can_be_answered_at_once_imports_nothing_large(tmp_path, command):
    (tmp_path / "broken.yaml").write_text("beta: [")
    (tmp_path / "misspelt.yaml").write_text("learning_rte: 1.0e-4")
    (tmp_path / "named.yaml").write_text("model_name_or_path: a\ndatasets: [{path: b}]")
    code, imported, said = imported_by(command, tmp_path)
    assert imported == []
    assert code == (0 if "--help" in command else 2)
    assert "--help" in command or said.count("\n") == 1


def test_versions_are_printed_before_pytorch_is_asked_for_devices(capsys, monkeypatch):
    def ask():
        assert "- transformers: " in capsys.readouterr().out
        return {"gpus": ["a GPU"]}

    monkeypatch.setattr("trl_paddingfree.machine.hardware", ask)
    assert cli.main(["env"]) == 0
    assert capsys.readouterr().out == "- gpus: a GPU\n"


def test_env_imports_pytorch_only_where_it_may_see_devices(tmp_path):
    code, imported, _ = imported_by("env", tmp_path)
    assert code == 0
    assert set(imported) <= (set() if version("torch").endswith("+cpu") else {"torch", "numpy"})


MISSING = {
    "": "Name the model",
    "--dataset_name pairs.jsonl": "Name the model",
    "--model_name_or_path org/model": "Name the data",
    "--model_name_or_path org/model --dataset_name pair.jsonl": "'pair.jsonl' is not a file or folder here",
    "--model_name_or_path ./model --dataset_name pairs.jsonl": "'./model' is not a file or folder here",
}


@pytest.mark.parametrize("options", MISSING)
def test_what_a_run_lacks_is_said_before_it_is_launched(capsys, monkeypatch, launched, tmp_path, pairs_file, options):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["dpo", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-paddingfree dpo: ")
    assert MISSING[options] in error
    assert launched == []


def test_a_reward_that_cannot_be_imported_is_named_with_its_option():
    with pytest.raises(ValueError, match=r"`--reward_funcs my_lib\.f` is not the import path .*No module named"):
        _load_reward("my_lib.f")


def test_sft_on_pairs_names_all_that_it_reads():
    with pytest.raises(ValueError, match="one of `input_ids`, `messages`, `text`, `conv"):
        refuse_unread_instructions(preference_data(4, 0), "train")


def test_offloading_without_an_accelerator_is_refused_before_launching(capsys, monkeypatch, launched):
    monkeypatch.setattr("trl_paddingfree.cli.train.has_accelerator", lambda: False)
    options = ["--activation_offloading", "true", "--use_cpu", "true", "--bf16", "false"]
    assert cli.main(["dpo", *options, *NAMED]) == 2
    assert "`--activation_offloading true` moves activations from an acc" in capsys.readouterr().err
    assert launched == []


def test_what_cannot_be_resumed_is_refused_before_launching(capsys, launched, tmp_path):
    options = ["--resume_from_checkpoint", "true", "--use_cpu", "true", "--bf16", "false", "--output_dir"]
    assert cli.main(["dpo", *NAMED, *options, str(tmp_path)]) == 2
    assert f"and '{tmp_path}' has no complete checkpoint: leave it out" in capsys.readouterr().err
    assert launched == []


def test_every_head_of_the_table_fits_into_a_terminal(capsys, monkeypatch, tmp_path, model_dir):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "prompts.jsonl"
    preference_data(64, SEED).select_columns("prompt").to_json(file)
    arguments = ["--max_completion_length", "512", "--batch_size", "8"]
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir, *arguments]) == 0
    printed = capsys.readouterr().out
    heads = {"slots", "tokens", "computed", "padding", "shared", "speed-up"}
    assert heads <= set(printed.partition("\n")[2].split("┡")[0].replace("┃", " ").split())
    assert "Tokens per prompt: " in printed


def test_what_truncation_does_is_said_of_one_and_of_many(capsys, tmp_path, model_dir):
    file = tmp_path / "pairs.jsonl"
    pair = {"prompt": "w1", "chosen": "w2 w3 w4 w5 w6 w7 w8 w9", "rejected": "w2"}
    Dataset.from_list([pair, {**pair, "chosen": "w3"}]).to_json(file)
    assert cli.main(["inspect", str(file), "--tokenizer", model_dir, "--max_length", "5"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "max_length 5 truncates 1 of 2 pairs and drops 0, which would have nothing left to learn from." in printed
