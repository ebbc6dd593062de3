"""The commands: what they run, and their exit codes."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from ..capabilities import module_of, needed
from ..core.versions import naming_versions
from ..hub import refuse_unreachable
from .load import NAME_THE_DATA, refuse_missing
from .options import LOADING, NO, OK, answer_at_once, make_parser, refuse, spelled

# As shells report processes that were killed by SIGINT or SIGPIPE
INTERRUPTED, PIPE_CLOSED = 130, 141


@naming_versions()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names, by default the arguments of the process, and return its exit code."""
    given = spelled(sys.argv[1:] if argv is None else argv)
    args, others = make_parser().parse_known_args(given)
    command = {"inspect": inspect, "check": check, "env": env, "quickstart": quickstart}.get(args.command)
    if command and others:  # argparse itself would show the usage of `trl-paddingfree`
        args.parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        code = command(args) if command else train(args.command, others)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        sys.stderr.write("trl-paddingfree: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough: Python would complain once more when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except LOADING as error:
        if "--traceback" in given:
            raise
        return refuse(args.command, error)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """In errors of files and the hub, name what was to be loaded, as the user typed it."""
    try:
        yield
    except OSError as error:
        if str(error).startswith(repr(name)):
            raise
        raise OSError(f"{name!r} is not a file or folder here, and the hub does not give it: {error}") from error


def at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Refuse values of options that are too small."""
    for name in names:
        if (value := vars(args)[name]) < least:
            raise ValueError(f"`--{name} {value}` must be at least {least}.")


def print_json(value: Mapping[str, object]) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2))


def inspect(args: argparse.Namespace) -> int:
    """`trl-paddingfree inspect`."""
    at_least(1, args, "batch_size", "num_generations", "max_completion_length")
    at_least(0, args, "max_length", "sample", "seed", "min_score_margin")
    refuse_missing(args.dataset, NAME_THE_DATA)
    if args.model is None and args.memory_gib is not None:
        raise ValueError(f"`--memory_gib {args.memory_gib}` needs `--model`, the model that has to fit.")

    from rich.console import Console
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    from ..core.data.lengths import has_images
    from ..core.trainers.configs import silence
    from ..registry import TASKS, task_of
    from .load import load_rows
    from .quickstart.charts import drawn, plot_waste
    from .savings import measure
    from .tables import print_memory, print_waste
    from .turns import split_turns

    silence()
    if args.model is not None:  # a wrong name is refused before data is loaded
        predict = needed("budgets", "predict", f"`--model {args.model}`")
        with loading(args.model):
            predict.model_config(args.model)
    with loading(args.dataset):
        dataset = load_rows(args.dataset, args.dataset_config, args.dataset_train_split)
    if args.one_sample_per_turn:
        dataset = split_turns(dataset, args.seed)
    with_images = has_images(dataset)
    images = needed("images", "savings", "data with images") if with_images else None
    if with_images and args.model is not None:
        raise ValueError(
            f"`--model {args.model}` predicts the memory of text only, and the data has images: leave `--model` out."
        )
    with loading(args.tokenizer):
        tokenizer = (AutoProcessor if with_images else AutoTokenizer).from_pretrained(args.tokenizer)
        config = AutoConfig.from_pretrained(args.tokenizer) if with_images else None
    token_id = getattr(config, "image_token_id", None)  # not all configurations have it
    if with_images and token_id is None:
        raise ValueError(
            f"The data has images, and {args.tokenizer!r} is not a model that reads them as tokens. Name one that does "
            "in `--tokenizer`, or remove the column of images."
        )
    columns = ["messages"] if args.one_sample_per_turn else dataset.column_names
    answers = module_of("answers", "savings")
    if is_of_answers := answers is not None and answers.is_of_answers(dataset):
        columns = answers.AnswersOf.columns(dataset)
    task, rows_of = task_of(columns, TASKS, () if images is None else [*filter(images.vision_collator, TASKS)]), None
    if is_of_answers:
        if with_images:
            raise ValueError(
                "The data has images and several answers per prompt, on which DPO trains, and which `inspect` cannot "
                "count: to count it, give each pair a row of its own."
            )
        rows_of = answers.AnswersOf(task, answer_pairs=args.answer_pairs, min_score_margin=args.min_score_margin)
        dataset = rows_of.with_pairs(dataset)
    report = measure(
        dataset,
        tokenizer,
        task,
        [args.batch_size * factor for factor in (1, 2, 4, 8)],
        max_length=args.max_length or None,
        truncation_mode=args.truncation_mode,
        sample=args.sample or None,
        seed=args.seed,
        in_order=args.one_sample_per_turn,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        rows_of=rows_of,
        count_images=None if images is None else partial(images.image_counts, token_id),
    )
    figures = report.as_dict()
    if args.model is not None:
        given = report.batches, args.model, args.tuning, args.memory_gib
        figures["memory"] = predict.memory_report(report.task.name, *given)
    if args.json:
        print_json(figures)
    else:
        print_waste(report)
        if args.model is not None:
            print_memory(figures["memory"])
    if args.plot:
        drawn(lambda: plot_waste(report, args.plot), args.plot, Console(stderr=True))
    return OK


def check(args: argparse.Namespace) -> int:
    """`trl-paddingfree check`."""
    refuse_missing(args.model, "Name the model.")
    refuse_unreachable(args.model, f"{args.model!r}")

    from rich.console import Console

    from .report import as_dict, check_model, load_model
    from .tables import print_routes

    given = args.model, args.dtype, args.attn_implementation
    if args.packed:
        with loading(args.model):
            result = needed("packed", "check", "`--packed`").check_packed(load_model(*given))
        if args.json:
            print_json({"packed": str(result.route), "verdict": result.verdict, **as_dict(result)})
        else:
            print(result)
        return OK if result.passed else NO
    tell = partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
    with loading(args.model):
        report = check_model(*given, tell)
    if args.json:
        print_json(report.as_dict())
    else:
        print_routes(report)
    return NO if report.chosen is None else OK


def env(args: argparse.Namespace) -> int:
    """`trl-paddingfree env`."""
    from ..machine import hardware, software

    if args.json:
        print_json(software() | hardware())
        return OK
    for look in (software, hardware):  # versions are printed first: devices need PyTorch, whose import takes seconds
        for name, value in look().items():
            for title, found in value.items() if isinstance(value, dict) else [(name, value)]:
                shown = ", ".join(found) or "none" if isinstance(found, list) else found
                print(f"- {title}: {'not installed' if shown is None else shown}", flush=True)
    return OK


def quickstart(args: argparse.Namespace) -> int:
    """`trl-paddingfree quickstart`."""
    at_least(1, args, "steps", "sft_steps", "batch_size", "max_length")
    at_least(0, args, "seed")
    for name in filter(None, (args.model, args.dataset_name)):
        refuse_missing(name, "")

    # A single GPU: with several, transformers would use `nn.DataParallel`, which TRL refuses
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

    from .quickstart.compare import run

    return run(args)


def train(task: str, argv: Sequence[str]) -> int:
    """
    `trl-paddingfree dpo`, `sft` and the other training commands: run a task's script through `accelerate launch`.

    Options that the script does not know go to `accelerate launch`, from the command line and from the YAML file of
    `--config`, as in `trl dpo` and `trl sft`; `--accelerate_config` names one of TRL's configurations, or a file.
    """
    argv = answer_at_once(task, argv)

    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from . import launched
    from . import train as script

    parser = script.make_parser(task, prog=f"trl-paddingfree {task}")
    *parsed, from_config, from_command_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    launcher = launch.launch_command_parser()
    parser.others = launcher.format_usage()
    launcher.error = parser.error  # wrong options of accelerate are answered in one line, too
    args = launcher.parse_args(
        [
            *resolve_accelerate_config_argument(from_config),
            *resolve_accelerate_config_argument(from_command_line),  # which wins
            "--module",
            launched.__name__,
            task,
            *argv,  # all of them: the script ignores those that only the launcher knows
        ]
    )
    if args.training_script != launched.__name__:
        parser.error(f"unrecognized arguments: {args.training_script}")
    script.look_ahead(parsed)
    # accelerate warns that it uses its defaults for options left out
    launch.logger.addFilter(lambda record: "had defaults used instead" not in record.getMessage())
    try:
        launch.launch_command(args)
    except subprocess.CalledProcessError as error:  # the script has said what went wrong
        return error.returncode
    except ChildFailedError as error:  # the process that failed has said why
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else NO
    return OK
