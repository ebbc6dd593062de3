"""The options of the commands, and every answer that needs only the arguments, without importing PyTorch."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from json import JSONDecodeError
from pathlib import Path
from textwrap import shorten
from typing import NoReturn

from yaml import YAMLError, safe_load

from .load import NAME_THE_DATA, refuse_missing

OK, NO, WRONG_USE = 0, 1, 2
# Errors of arguments, names and files, and of missing packages
LOADING = (ValueError, OSError, ImportError, YAMLError)

EXIT_CODES = """\
exit codes:
  0  done; from `check` and `quickstart` also: the results agree
  1  `check` refuses the model or its packing, or the losses of `quickstart` differ
  2  wrong arguments, something cannot be loaded, or a training command refuses the model
  training commands return the exit code of the training script"""
TRACEBACK = "show where in the code an error is raised"
# The commands that train, and on what
TRAINING = {
    "dpo": "on preference pairs",
    "sft": "on instructions",
    "reward": "a reward model on preference pairs",
    "kto": "on completions labeled desirable or undesirable",
    "grpo": "on rewards of its own completions, compared within a group",
    "rloo": "on rewards of its own completions, against the mean of the others",
    "distillation": "on a teacher's predictions for its own completions",
}
# What commands need: at least one of these options; otherwise, they are refused with this advice
_NEEDED = [
    (TRAINING, ["model_name_or_path"], "Name the model: `--model_name_or_path` (hub name or folder)."),
    (TRAINING, ["datasets", "dataset_name"], NAME_THE_DATA),
    (
        ["grpo", "rloo"],
        ["reward_funcs", "reward_model_name_or_path"],
        "Name what rewards completions: `--reward_funcs` (a function of TRL or an import path, such as "
        "my_lib.rewards.my_reward), or `--reward_model_name_or_path`.",
    ),
    (
        ["distillation"],
        ["teacher_model_name_or_path"],
        "Name the teacher: `--teacher_model_name_or_path` (hub name or folder).",
    ),
]


def refuse(command: str, error: Exception) -> int:
    """Print why a command cannot run, and return its exit code."""
    message = str(error)
    if isinstance(error, JSONDecodeError):
        place = f"line {error.lineno}, column {error.colno}"
        message = f"{shorten(error.doc, 200)} is not valid JSON: {place}: {error.msg}."
    elif isinstance(error, YAMLError):  # it names the file, in several lines
        message = f"not valid YAML: {' '.join(message.split())}."
    sys.stderr.write("\n".join([f"trl-paddingfree {command}: {message}", *vars(error).get("__notes__", ()), ""]))
    return WRONG_USE


class OneLineParser(argparse.ArgumentParser):
    """Reports wrong arguments in one line that suggests the closest name, where argparse lists all options."""

    others = ""  # the usage of another parser, which takes the options unknown to this one

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit."""
        word, known = "", ""
        if read := re.match(r"argument --([\w-]+).*: invalid choice: '(?:True|False)' ", message):
            name = read[1].replace("-", "_")
            message += f'. YAML reads a bare `no` as False and `yes` as True: write `{name}: "no"`, in quotes'
            self.exit(WRONG_USE, f"{self.prog}: {message}.\n")
        if unknown := re.match(r"unrecognized arguments: .*?(--[\w-]+)", message):
            word, known = spelled([unknown[1]])[0], self.format_usage() + self.others
        elif choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            word, known = choice.groups()
        close = get_close_matches(word, re.findall(r"[\w.-]+", known), n=1, cutoff=0.7)
        suggestion = f"Did you mean `{close[0]}`?" if close else f"`{self.prog} --help` lists all."
        self.exit(WRONG_USE, f"{self.prog}: {message.rstrip('.')}. {suggestion}\n")


def spelled(argv: Sequence[str]) -> list[str]:
    """
    The arguments, with option names in one spelling: `--batch_size` and `--batch-size` are the same, as in TRL.

    >>> spelled(["inspect", "my-pairs.jsonl", "--batch-size=4", "--max-length", "512"])
    ['inspect', 'my-pairs.jsonl', '--batch_size=4', '--max_length', '512']
    """
    return [re.sub("(?<=^--)[^=]+", lambda name: name[0].replace("-", "_"), word) for word in argv]


def _sources() -> Iterator[Path]:
    """The files that name the options of training commands: ours, TRL's, transformers' and those of the launcher."""
    for package, patterns in {
        "trl": ("trainer/*_config.py", "scripts/*.py"),
        "transformers": ("training_args.py", "utils/generic.py"),
        "accelerate": ("commands/launch.py",),
        "trl_paddingfree": ("**/*.py",),
    }.items():
        spec = find_spec(package)  # of a top-level package, which imports nothing
        for folder in (spec and spec.submodule_search_locations) or ():
            for pattern in patterns:
                yield from Path(folder).glob(pattern)


def refuse_misspelt(parser: OneLineParser, options: Sequence[str]) -> None:
    """
    Refuse `options` that no source of options mentions, if one that they do mention is close. The parsers that know all
    of them need TRL, whose import takes seconds; whatever is not refused here is left to them.
    """
    if not options:
        return
    text = "\n".join(file.read_text(encoding="utf-8") for file in _sources())
    mentioned = {*re.findall(r"\w+", text)}
    names = {*re.findall(r"^    (\w+): ", text, re.MULTILINE), *re.findall(r'"--(\w+)"', text)}
    for option in options:
        name = option.removeprefix("--").partition("=")[0].removeprefix("no_")
        is_start = any(each.startswith(name) for each in names)  # parsers complete names
        if name not in mentioned and not is_start and get_close_matches(name, names, n=1, cutoff=0.7):
            parser.others = " ".join(f"--{each}" for each in names)
            parser.error(f"unrecognized arguments: {option}")


def answer_at_once(task: str, argv: Sequence[str]) -> list[str]:
    """
    Refuse a missing `--config` file, a misspelt option, and a training command without a model, data, rewards or a
    teacher. Everything else is left to TRL's parser.

    Returns the arguments in the form that TRL reads: `--config FILE` and `--accelerate_config NAME` as two words each.
    """
    config = {}
    parser = OneLineParser(prog=f"trl-paddingfree {task}", add_help=False)
    for name in {"config", "accelerate_config"}.union(*(names for _, names, _ in _NEEDED)):
        parser.add_argument(f"--{name}", nargs="+", default=argparse.SUPPRESS)
    given, words = parser.parse_known_args(spelled(argv))
    named = {name: values[0] for name, values in vars(given).items()}
    if "config" in named:
        with open(named["config"], encoding="utf-8") as file:
            config = safe_load(file)
    keys = [f"--{key}" for key in config] if isinstance(config, dict) else []
    refuse_misspelt(parser, [word for word in (*words, *keys) if re.match(r"--\w", word)])
    if isinstance(config, dict) and not {"-h", "--help"}.intersection(words):  # TRL checks the rest of a file
        for tasks, names, advice in _NEEDED:
            value = next(filter(None, map((config | named).get, names)), None)
            if task in tasks and isinstance(value, str | None):
                refuse_missing(value, advice)
    return words + [word for name, values in vars(given).items() for word in (f"--{name}", *values)]


def make_parser() -> OneLineParser:
    """The parser of all commands. Arguments of training commands are left to their own parsers."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="trl-paddingfree",
        description="TRL's trainers without padding, with shared prefixes computed once, and with the same results.",
        epilog="examples:\n"
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B --batch_size 8\n"
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized\n\n"
        + EXIT_CODES,
        formatter_class=as_is,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, examples: str):
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{examples}\n\n{EXIT_CODES}",
            formatter_class=as_is,
        )
        command.set_defaults(parser=command)
        command.add_argument("--traceback", action="store_true", help=TRACEBACK)
        command.add_argument("--json", action="store_true", help="print JSON")

        def option(name: str, meaning: str, default: str | float | None = None, **others):
            """Add an option that has the type of its default."""
            if default is not None:
                meaning = f"{meaning} (default: {default})"
                others |= {"default": default, "type": type(default)}
            command.add_argument(name, help=meaning, **others)

        return option

    option = add(
        "inspect",
        "count what padding wastes on a dataset and what shared prefixes save, without a model or a GPU",
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree inspect pairs.jsonl.gz --tokenizer ./my-model --batch_size 16 --max_length 2048 --json",
    )
    option("dataset", "hub name, folder, or .json, .jsonl, .csv, .parquet or .arrow file")
    option("--tokenizer", "hub name or folder of the model or its tokenizer", required=True)
    option("--dataset_config", "configuration of the hub dataset")
    option("--dataset_train_split", "split to look at", "train")
    option("--batch_size", "examples per device and batch", 8)
    option("--max_length", "tokens per sequence, 0 for no limit", 1024)
    option("--truncation_mode", "what longer sequences keep", "keep_start", choices=["keep_start", "keep_end"])
    option("--one_sample_per_turn", "cut conversations into turns first, as `sft` does", action="store_true")
    option("--num_generations", "completions of each prompt, if the data has prompts only", 8)
    option("--max_completion_length", "tokens of each completion, if the data has prompts only", 256)
    option(
        "--answer_pairs",
        "which pairs of a prompt's `completions` and `scores`",
        "all",
        choices=["all", "best", "extremes"],
    )
    option("--min_score_margin", "least difference of a pair's scores", 0.0)
    option("--sample", "rows to look at, 0 for all", 2000)
    option("--seed", "seed of the sample and the batches", 0)
    option("--model", "also predict memory: hub name or folder (its config only), or a shape such as llama-3-8b")
    option("--tuning", "which weights of --model are trained", "lora", choices=["full", "lora", "qlora"])
    option("--memory_gib", "memory of a device: which batches of --model fit, and how fast they train", type=float)
    option("--plot", "also draw a chart: the PNG to write")

    option = add(
        "check",
        "run the start-up check on a model: every backend of this machine, how exact each is, and the verdict",
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n  trl-paddingfree check ./my-model --dtype float32 --json\n"
        "  trl-paddingfree check Qwen/Qwen3-0.6B --packed",
    )
    option("model", "hub name or folder of a causal language model or of a reward model")
    option("--dtype", "dtype of the weights", "auto", choices=["auto", "float32", "float16", "bfloat16"])
    option("--attn_implementation", "load the model with this implementation, and try no other")
    option("--packed", "check rows packed as TRL packs them instead of flat batches", action="store_true")

    for task, data in TRAINING.items():
        commands.add_parser(task, help=f"train {data}: `trl {task}`, without padding", add_help=False)
    add("env", "print versions, GPUs and attention backends for bug reports", "  trl-paddingfree env --json > env.json")

    option = add(
        "quickstart",
        "train with padded TRL and without padding, side by side, on a small model from scratch or on yours",
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree quickstart --model Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --use_peft",
    )
    option("--model", "hub name or folder of a model (default: a small Llama from scratch)")
    option("--dataset_name", "hub name, folder or file (default: Python's own documentation)")
    option("--dataset_config", "configuration of the hub dataset")
    option("--dataset_train_split", "split to train on", "train")
    option("--steps", "optimizer steps of each run", 24)
    option("--sft_steps", "steps of SFT before DPO", 150)
    option("--batch_size", "examples per batch", 8)
    option("--max_length", "tokens per sequence", 512)
    option("--use_peft", "train LoRA adapters only", action="store_true")
    option("--seed", "seed of everything", 42)
    option("--output_dir", "folder to write to", "quickstart")
    return parser
