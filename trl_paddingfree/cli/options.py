"""The options of the commands, and the answers to wrong ones, all without the seconds that importing PyTorch takes."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

OK, NO, WRONG_USE = 0, 1, 2
# Errors of arguments, of names, and of packages that are missing
LOADING = (ValueError, OSError, ImportError)

EXIT_CODES = """\
exit codes:
  0  done; of `check` and `quickstart` also: exact
  1  the answer is no: a model that `check` refuses, losses that differ
  2  wrong arguments, something that cannot be loaded, or a model that is not trained
  commands that train end with the exit code of the training script"""
TRACEBACK = "show where in the code an error comes from"
# The commands that train, and on what
TRAINING = {
    "dpo": "on preference pairs",
    "sft": "on instructions",
    "reward": "a reward model on preference pairs",
    "kto": "on completions that are desirable or not",
    "grpo": "on rewards of completions that it generates, by groups",
    "rloo": "on rewards of completions that it generates, leaving one out",
    "distillation": "on what a teacher says of completions that it generates",
}
# Where options of training commands are defined: as fields of configurations, or as arguments of `accelerate launch`
_SOURCES = {
    "transformers": ["training_args.py"],
    "trl": [
        *("trainer/base_config.py", "trainer/{task}_config.py", "trainer/model_config.py", "scripts/utils.py"),
        *("scripts/grpo.py", "scripts/rloo.py", "cli/accelerate_config.py"),
    ],
    "accelerate": ["commands/launch.py"],
    "trl_paddingfree": ["trainers/configs.py", "cli/train.py"],
}
# In these files: `    name: type` of a field, or `"--name"` of an argument
_NAMED = re.compile(r"^    (\w+): |\"--([\w-]+)\"", re.MULTILINE)


def refuse(command: str, error: Exception) -> int:
    """Say why a command cannot be carried out."""
    notes = vars(error).get("__notes__", ())
    sys.stderr.write("\n".join([f"trl-paddingfree {command}: {error}", *notes, ""]))
    return WRONG_USE


class OneLineParser(argparse.ArgumentParser):
    """Answers wrong arguments in one line, with the closest name that exists, where argparse lists all options."""

    def known_options(self) -> list[str]:
        """The names of all options."""
        return re.findall(r"--\w+", self.format_usage())

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit."""
        unknown = re.match(r"unrecognized arguments: .*?(--[\w-]+)", message)
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        meant: list[str] = []
        if unknown:
            meant = get_close_matches(spelled([unknown[1]])[0], self.known_options(), n=1, cutoff=0.7)
        elif choice:
            meant = get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), n=1)
        suggestion = f" Did you mean `{meant[0]}`?" if meant else f" `{self.prog} --help` lists all."
        self.exit(WRONG_USE, f"{self.prog}: {message.rstrip('.')}.{suggestion}\n")


def spelled(argv: Sequence[str]) -> list[str]:
    """
    The arguments, with names of options in one spelling: `--batch_size` and `--batch-size` are the same, as in TRL.

    >>> spelled(["inspect", "my-pairs.jsonl", "--batch-size=4", "--max-length", "512"])
    ['inspect', 'my-pairs.jsonl', '--batch_size=4', '--max_length', '512']
    """
    return [re.sub("^--[^=]+", lambda name: name[0].replace("-", "_").replace("__", "--", 1), word) for word in argv]


def separated(argv: Sequence[str]) -> list[str]:
    """
    The arguments, with `--config=FILE` and `--accelerate-config=NAME` as two words each: TRL searches the list for the
    option, and takes the next word.

    >>> separated(["--config=dpo.yaml", "--accelerate-config=zero2", "--beta=0.1"])
    ['--config', 'dpo.yaml', '--accelerate_config', 'zero2', '--beta=0.1']
    """
    words: list[str] = []
    for word, name in zip(argv, spelled(argv), strict=True):
        is_looked_for = name.partition("=")[0] in ("--config", "--accelerate_config")
        words += name.split("=", 1) if is_looked_for else [word]
    return words


def refuse_unknown(task: str, argv: Sequence[str]) -> None:
    """
    Refuse an option that a training command does not have. Names are read from the source files that define options,
    because importing these takes seconds. Values are left to the parsers, and so is everything if a file has moved.
    """
    known: set[str] = set()
    for package, paths in _SOURCES.items():
        spec = find_spec(package)
        root = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()
        for path in paths:
            if not (file := root / path.format(task=task)).is_file():
                return
            known |= {"".join(names).replace("-", "_") for names in _NAMED.findall(file.read_text(encoding="utf-8"))}
    options = [f"--{name}" for name in known]
    parser = OneLineParser(prog=f"trl-paddingfree {task}")
    parser.known_options = lambda: options  # type: ignore[method-assign]
    for word, spelt in zip(argv, spelled(argv), strict=True):  # argparse takes the beginning of a name for it
        begins = spelt.partition("=")[0]
        meant = (begins, begins.replace("--no_", "--", 1))
        if begins.startswith("--") and not any(name.startswith(meant) for name in ("--config", "--help", *options)):
            parser.error(f"unrecognized arguments: {word}")
    if argv[-1:] == ["--config"]:
        parser.error("argument --config: expected the name of a YAML file")


def make_parser() -> OneLineParser:
    """The parser of all commands but those that hand their arguments on."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="trl-paddingfree",
        description="TRL's trainers with next to no padding, and with shared prefixes computed once, exactly.",
        epilog="examples:\n"
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B --batch_size 8\n"
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized\n\n"
        + EXIT_CODES,
        formatter_class=as_is,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, examples: str = "") -> Callable[..., argparse.Action]:
        description, epilog = f"{text[0].upper()}{text[1:]}.", f"examples:\n{examples}\n\n{EXIT_CODES}"
        command = commands.add_parser(name, help=text, description=description, epilog=epilog, formatter_class=as_is)
        command.set_defaults(parser=command)
        command.add_argument("--traceback", action="store_true", help=TRACEBACK)
        if examples:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command.add_argument

    option = add(
        "inspect",
        "what padding wastes on a data set and what shared prefixes save, without a model or a GPU",
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree inspect pairs.jsonl.gz --tokenizer ./my-model --batch_size 16 --max_length 2048 --json",
    )
    option("dataset", help="hub name, folder, or .json, .jsonl, .csv, .parquet or .arrow file")
    option("--tokenizer", required=True, help="hub name or folder of the model or its tokenizer")
    option("--dataset_config", help="configuration of the hub data set")
    option("--dataset_train_split", default="train", help="split to look at (default: %(default)s)")
    option("--batch_size", type=int, default=8, help="examples per device and batch (default: 8)")
    option("--max_length", type=int, default=1024, help="tokens per sequence, 0 for no limit (default: %(default)s)")
    option("--truncation_mode", choices=["keep_start", "keep_end"], default="keep_start")
    option("--one_sample_per_turn", action="store_true", help="cut conversations into turns first, as `sft` does")
    option("--num_generations", type=int, default=8, help="of prompts alone: completions of each (default: 8)")
    tokens = "of prompts alone: tokens of each completion, which are all counted (default: %(default)s)"
    option("--max_completion_length", type=int, default=256, help=tokens)
    option("--sample", type=int, default=2000, help="rows to look at, 0 for all (default: %(default)s)")
    option("--seed", type=int, default=0, help="seed of the sample and the batches (default: 0)")
    option("--model", help="also predict memory: hub name or folder (its config only), or a shape such as llama-3-8b")
    option("--tuning", choices=["full", "lora", "qlora"], default="lora", help="what of --model is trained")
    option("--memory_gib", type=float, help="memory of a device: which batches of --model fit, how fast")
    option("--plot", help="also draw a chart: the PNG to write")

    option = add(
        "check",
        "the start-up check by hand: every backend that this machine offers, how exact it is, and the verdict",
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n  trl-paddingfree check ./my-model --dtype float32 --json\n"
        "  trl-paddingfree check Qwen/Qwen3-0.6B --packed",
    )
    option("model", help="hub name or folder of a causal language model or of a reward model")
    option("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto")
    option("--attn_implementation", help="load the model with this one, and try no other")
    option("--packed", action="store_true", help="whether transformers' own packed rows are exact, in place of ours")

    for task, data in TRAINING.items():
        add(task, f"train {data}: `trl {task}`, without padding")
    add("env", "versions, GPU and attention backends, for bug reports", "  trl-paddingfree env --json > env.json")

    option = add(
        "quickstart",
        "padded TRL and padding-free training side by side, on a small model from scratch or on yours",
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree quickstart --model Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --use_peft",
    )
    option("--model", help="hub name or folder of a model; a small Llama from scratch, if left out")
    option("--dataset_name", help="hub name, folder or file; Python's own documentation, if left out")
    option("--dataset_config", help="configuration of the hub data set")
    option("--dataset_train_split", default="train", help="split to train on (default: %(default)s)")
    option("--steps", type=int, default=24, help="optimizer steps of each run (default: %(default)s)")
    option("--sft_steps", type=int, default=150, help="steps of SFT before DPO (default: %(default)s)")
    option("--batch_size", type=int, default=8, help="examples per batch (default: %(default)s)")
    option("--max_length", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    option("--use_peft", action="store_true", help="train LoRA adapters only")
    option("--seed", type=int, default=42, help="seed of everything (default: %(default)s)")
    option("--output_dir", default="quickstart", help="where to write to (default: %(default)s)")
    return parser
