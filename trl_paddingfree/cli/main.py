"""The commands: their arguments, and what they print."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..trainers.quiet import silence

OK, NO, WRONG_USE = 0, 1, 2
# As shells report processes that SIGINT or SIGPIPE ended
INTERRUPTED, PIPE_CLOSED = 130, 141
EXIT_CODES = """\
exit codes:
  0  done; of `check`, `bench` and `quickstart` also: exact
  1  the answer is no: a model that is refused, losses that differ
  2  wrong arguments, or something that cannot be loaded
  commands that train end with the exit code of the training script"""
# Small enough for two minutes on two cores
SMALL_BENCHMARK = ["dpo", "--lengths", "uniform:16-256", "--batch-size", "4", "--batches", "1", "--rounds", "1"]
# Those that train, and what on
TRAINING = {
    "dpo": "on preference pairs",
    "sft": "on instructions",
    "reward": "a reward model on preference pairs",
    "kto": "on completions that are desirable or not",
    "grpo": "on rewards of completions that it generates, by groups",
    "rloo": "on rewards of completions that it generates, leaving one out",
}
# Errors of arguments, of names, and of packages that are missing
LOADING = (ValueError, OSError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments. Defaults to those of the process.

    Returns:
        `int`: Exit code: 0 if done, 1 if the answer is no, 2 if the arguments are wrong or something cannot be loaded.

    Examples:
    ```python
    >>> from trl_paddingfree.cli import main
    >>> main(["env", "--json"])  # doctest: +ELLIPSIS
    {
      "python": ...
    0

    ```
    """
    silence()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run(given)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("trl-paddingfree: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough: Python would complain once more when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def run(given: list[str]) -> int:
    """Run the command that the arguments name, and give its exit code."""
    # These have parsers of their own, with hundreds of options
    if given and given[0] in TRAINING:
        return train(given[0], given[1:])
    if given and given[0] == "bench":
        return bench(given[1:])
    args, unknown = make_parser().parse_known_args(spelled(given, "_"))
    if unknown:  # argparse would show how all commands are called, not this one
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return args.run(args)
    except BrokenPipeError:  # an `OSError`, of which the user need not hear
        raise
    except LOADING as error:
        if args.traceback:
            raise
        return refuse(args.command, error)


def spelled(argv: Sequence[str], dash: str) -> list[str]:
    """
    The arguments, with names of options in one spelling: `--batch_size` and `--batch-size` are the same, as in TRL.

    Examples:
    ```python
    >>> from trl_paddingfree.cli.main import spelled
    >>> spelled(["bench", "dpo", "--batch_size=4", "--name", "my_run"], "-")
    ['bench', 'dpo', '--batch-size=4', '--name', 'my_run']

    ```
    """
    parts = (given.partition("=") for given in argv)
    return [
        f"--{name[2:].translate({ord('_'): dash, ord('-'): dash})}{equals}{value}"
        if name.startswith("--")
        else name + equals + value
        for name, equals, value in parts
    ]


def refuse(command: str, error: Exception) -> int:
    """Say why a command cannot be carried out."""
    sys.stderr.write(f"trl-paddingfree {command}: {error}\n")
    return WRONG_USE


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but those that hand their arguments on."""
    parser = argparse.ArgumentParser(
        prog="trl-paddingfree",
        description="TRL's trainers without computing a single wasted token, exactly.",
        epilog="examples:\n"
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B --batch_size 8\n"
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized\n\n"
        + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int] | None, text: str, examples: str = "") -> Any:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"examples:\n{examples}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command)
        command.add_argument("--traceback", action="store_true", help="show where in the code an error comes from")
        return command

    _add_inspect(add)
    _add_check(add)
    add("bench", None, "time padded TRL and padding-free training side by side; two minutes, if nothing else is asked")
    for task, data in TRAINING.items():
        add(task, None, f"train {data}: `trl {task}`, without padding")
    command = add(
        "env", env, "versions, GPU and attention backends, for bug reports", "  trl-paddingfree env --json > env.json"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    _add_quickstart(add)
    return parser


def _add_inspect(add: Callable) -> None:
    command = add(
        "inspect",
        inspect,
        "what padding wastes on a data set and what shared prefixes save, without a model or a GPU",
        "  trl-paddingfree inspect trl-lib/ultrafeedback_binarized --tokenizer Qwen/Qwen3-0.6B\n"
        "  trl-paddingfree inspect pairs.jsonl.gz --tokenizer ./my-model --batch_size 16 --max_length 2048 --json",
    )
    command.add_argument("dataset", help="hub name, folder, or .json, .jsonl, .csv, .parquet or .arrow file")
    command.add_argument("--tokenizer", required=True, help="hub name or folder of the model or its tokenizer")
    command.add_argument("--dataset_config", help="configuration of the hub data set")
    command.add_argument("--dataset_train_split", default="train", help="split to look at (default: %(default)s)")
    command.add_argument("--batch_size", type=int, default=8, help="examples per device and batch (default: 8)")
    command.add_argument(
        "--max_length", type=int, default=1024, help="tokens per sequence, 0 for no limit (default: %(default)s)"
    )
    command.add_argument("--truncation_mode", choices=["keep_start", "keep_end"], default="keep_start")
    command.add_argument(
        "--one_sample_per_turn", action="store_true", help="cut conversations into turns first, as `sft` does"
    )
    command.add_argument(
        "--num_generations", type=int, default=8, help="of prompts alone: completions of each (default: %(default)s)"
    )
    command.add_argument(
        "--max_completion_length",
        type=int,
        default=256,
        help="of prompts alone: tokens of each completion, which are all counted (default: %(default)s)",
    )
    command.add_argument("--sample", type=int, default=2000, help="rows to look at, 0 for all (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of the sample and the batches (default: 0)")
    command.add_argument(
        "--model", help="also predict memory: hub name or folder (its config only), or a shape of `bench`"
    )
    command.add_argument(
        "--tuning", choices=["full", "lora", "qlora"], default="lora", help="what of --model is trained"
    )
    command.add_argument("--memory_gib", type=float, help="memory of a device: which batches of --model fit, how fast")
    command.add_argument("--plot", default="inspect.png", help="PNG to write, '' for none (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_check(add: Callable) -> None:
    command = add(
        "check",
        check,
        "the start-up check by hand: every backend that this machine offers, how exact it is, and the verdict",
        "  trl-paddingfree check Qwen/Qwen3-0.6B\n  trl-paddingfree check ./my-model --dtype float32 --json",
    )
    command.add_argument("model", help="hub name or folder of a causal language model")
    command.add_argument("--dtype", choices=["auto", "float32", "float16", "bfloat16"], default="auto")
    command.add_argument("--attn_implementation", help="load the model with this one, and try no other")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_quickstart(add: Callable) -> None:
    command = add(
        "quickstart",
        quickstart,
        "padded TRL and padding-free training side by side, on a small model from scratch or on yours",
        "  trl-paddingfree quickstart\n"
        "  trl-paddingfree quickstart --model Qwen/Qwen3-0.6B --dataset_name pairs.jsonl --use_peft",
    )
    command.add_argument("--model", help="hub name or folder of a model; a small Llama from scratch, if left out")
    command.add_argument("--dataset_name", help="hub name, folder or file; Python's own documentation, if left out")
    command.add_argument("--dataset_config", help="configuration of the hub data set")
    command.add_argument("--dataset_train_split", default="train", help="split to train on (default: %(default)s)")
    command.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (default: %(default)s)")
    command.add_argument("--sft_steps", type=int, default=150, help="steps of SFT before DPO (default: %(default)s)")
    command.add_argument("--batch_size", type=int, default=8, help="examples per batch (default: %(default)s)")
    command.add_argument("--max_length", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    command.add_argument("--use_peft", action="store_true", help="train LoRA adapters only")
    command.add_argument("--seed", type=int, default=42, help="seed of everything (default: %(default)s)")
    command.add_argument("--output_dir", default="quickstart", help="where to write to (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def loaded(name: str, load: Callable[[], Any]) -> Any:
    """The result of `load`. Its errors are given a message that names `name`, which the user typed."""
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except DatasetsError as error:  # a file that is there, and is not what its name says
        raise ValueError(f"{name!r} cannot be read: {error}. {error.__cause__ or ''}") from error
    except OSError as error:
        raise OSError(f"{name!r} is no file or folder here, and the hub does not give it: {error}") from error


def at_least(least: int, **values: int) -> None:
    """Refuse values of options that are too small."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"`--{name} {value}` must be at least {least}.")


def print_json(value: dict[str, Any]) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def inspect(args: argparse.Namespace) -> int:
    """`trl-paddingfree inspect`."""
    from rich.console import Console
    from rich.progress import track
    from transformers import AutoProcessor, AutoTokenizer

    from ..charts import plot_waste
    from ..data.images import has_images
    from ..data.load import load_rows
    from ..data.savings import measure
    from ..data.task import task_of
    from ..data.turns import split_turns
    from ..trainers.registry import TASKS
    from .tables import print_memory, print_waste

    at_least(1, batch_size=args.batch_size, num_generations=args.num_generations)
    at_least(1, max_completion_length=args.max_completion_length)
    at_least(0, max_length=args.max_length, sample=args.sample)
    progress = Console(stderr=True)
    dataset = loaded(args.dataset, lambda: load_rows(args.dataset, args.dataset_config, args.dataset_train_split))
    if args.one_sample_per_turn:
        dataset = split_turns(dataset, args.seed)
    with_images = has_images(dataset)
    if with_images and args.model is not None:
        raise ValueError(
            f"`--model {args.model}` predicts the memory of text, and the data has images, whose memory in the vision "
            "tower is not known: leave `--model` out."
        )
    reader: Any = AutoProcessor if with_images else AutoTokenizer
    report = measure(
        dataset,
        loaded(args.tokenizer, lambda: reader.from_pretrained(args.tokenizer)),
        task_of(dataset.column_names, TASKS),
        [args.batch_size * factor for factor in (1, 2, 4, 8)],
        max_length=args.max_length or None,
        truncation_mode=args.truncation_mode,
        sample=args.sample or None,
        seed=args.seed,
        in_order=args.one_sample_per_turn,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        image_token_id=image_token(args.tokenizer) if with_images else None,
        track=lambda batches, total, what: track(batches, what, total, console=progress, transient=True),
    )
    memory = _memory(args, report)
    if args.json:
        print_json(report.as_dict() | ({"memory": memory} if memory else {}))
    else:
        print_waste(report)
        if memory:
            print_memory(memory)
    if args.plot:
        try:
            plot_waste(report, args.plot)
            progress.print(f"Chart: {args.plot}", soft_wrap=True)
        except ImportError as error:
            progress.print(f"No chart: {error}", markup=False, soft_wrap=True)
    return OK


def image_token(model: str) -> int:
    """The placeholder of an image in the rows of a model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model).image_token_id
    except AttributeError as error:
        raise ValueError(
            f"The data has images, and {model!r} is no model that reads them as tokens of its rows. Name one that does "
            "in `--tokenizer`, or remove the column of images."
        ) from error


def _memory(args: argparse.Namespace, report: Any) -> dict[str, Any] | None:
    """What `--model` would need of memory, if it was asked for."""
    if args.model is None:
        if args.memory_gib is not None:
            raise ValueError(f"`--memory_gib {args.memory_gib}` needs `--model`, whose memory it is.")
        return None
    from ..benchmark.memory import memory_report

    batches = [(waste.batch_size, waste.batches) for waste in report.waste]
    make = partial(memory_report, report.task.name, batches, args.model, args.tuning, args.memory_gib)
    return loaded(args.model, make)


def check(args: argparse.Namespace) -> int:
    """`trl-paddingfree check`."""
    from ..check.report import check_model
    from .tables import print_routes

    report = loaded(args.model, lambda: check_model(args.model, args.dtype, args.attn_implementation))
    if args.json:
        print_json(report.as_dict())
    else:
        print_routes(report)
    return OK if report.chosen is not None else NO


def env(args: argparse.Namespace) -> int:
    """`trl-paddingfree env`."""
    from ..check.machine import environment

    found = environment()
    if args.json:
        print_json(found)
        return OK
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"- {entry}: {'not installed' if of is None else of}" for entry, of in value.items()]
        else:
            lines.append(f"- {name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    sys.stdout.write("\n".join(lines) + "\n")
    return OK


def quickstart(args: argparse.Namespace) -> int:
    """`trl-paddingfree quickstart`."""
    import datasets
    from transformers.utils import logging

    from ..quickstart import compare

    at_least(1, steps=args.steps, sft_steps=args.sft_steps, batch_size=args.batch_size, max_length=args.max_length)
    one_gpu()
    if args.model is None:  # what is tokenized, saved and loaded here takes no time
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
    return compare.run(args)


def bench(argv: list[str]) -> int:
    """`trl-paddingfree bench`."""
    from ..benchmark import main as benchmark

    one_gpu()
    try:
        return benchmark(spelled(argv or SMALL_BENCHMARK, "-"), prog="trl-paddingfree bench")
    except LOADING as error:
        return refuse("bench", error)


def one_gpu() -> None:
    """Leave this process one GPU of several: TRL refuses `nn.DataParallel`, which transformers would make of them."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


def train(task: str, argv: list[str]) -> int:
    """`trl-paddingfree dpo`, `sft` and the others that train."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from yaml import YAMLError

    from .launch import launch

    try:
        return launch(task, argv)
    except YAMLError as error:
        return refuse(task, ValueError(f"the file of `--config` is no YAML: {' '.join(str(error).split())}"))
    except LOADING as error:  # configurations refuse some values
        return refuse(task, error)
    except ChildFailedError:  # the process that failed has said why
        return NO
