"""Compare padded TRL with padding-free training, measure single parts, and write the documentation's tables.

    python -m scripts.benchmark dpo --model smollm2-135m --lengths uniform:50-500 --output results
    python -m scripts.benchmark --collators results         # time to collate 64 rows of 4,096 tokens
    python -m scripts.benchmark --casts results             # what casting inputs of adapters once saves
    python -m scripts.benchmark --compiled results          # kernels and bytes of a layer, compiled and eager
    python -m scripts.benchmark --answers lengths/*.csv     # all pairs of several answers per prompt
    python -m scripts.benchmark --arranging lengths/*.csv   # what `arrange_micro_batches` changes
    python -m scripts.benchmark --hybrids lengths/*.csv     # operations of models whose layers carry state
    python -m scripts.benchmark --packing lengths/*.csv     # what packing changes against padding-free batches
    python -m scripts.benchmark --heads reward=pairs.jsonl grpo=prompts.jsonl --model FOLDER  # Reward, KTO and GRPO
    python -m scripts.benchmark --agreement reward=pairs.jsonl --model FOLDER  # TRL's commands and ours: every figure
    python -m scripts.benchmark --vision results            # a small model learns to read pictures
    python -m scripts.benchmark --parts results             # a memory budget that splits micro-batches
    python -m scripts.benchmark --slices results            # operations and bytes of slices, and the lengths that fit
    python -m scripts.benchmark --render results/dpo.json   # write the table and draw the chart again
    python -m scripts.benchmark --beside REVISION           # print results beside those of an earlier revision
    python -m scripts.benchmark --readme [--check]          # write the documentation's tables from docs/benchmarks

The methods take turns in one process, on the same rows, with the same model and seed. The command fails if figures
disagree, or if a method cannot train for another reason than memory. A length file has the columns
prompt,chosen,rejected (dpo) or total,assistant (sft), in tokens.
"""

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import logging

from trl_paddingfree.core.trainers.configs import silence

from . import beside, report, tables
from .environment import ROOT, default_device, environment, keep_pages, provenance
from .rows import dataset_rows, make_rows
from .run import Benchmark
from .shapes import SHAPES
from .tasks import BENCHMARKED, Settings

COMMAND = ("python", "-m", "scripts.benchmark")
BENCHMARKS = ROOT / "docs" / "benchmarks"
# The studies, by their arguments: a folder to write to, files of lengths, or tasks with their data and a model
OF_MACHINE, OF_LENGTHS, OF_MODEL = (
    ("casts", "collators", "compiled", "parts", "slices", "vision"),
    ("answers", "arranging", "hybrids", "packing"),
    ("heads", "agreement"),
)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the benchmark."""
    parser = argparse.ArgumentParser(
        prog=" ".join(COMMAND),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("task", nargs="?", choices=BENCHMARKED, help="what to set side by side")
    for kind in OF_MACHINE:
        what.add_argument(f"--{kind}", type=Path, metavar="FOLDER")
    for kind in OF_LENGTHS:
        what.add_argument(f"--{kind}", nargs="+", metavar="LENGTHS")
    for kind in OF_MODEL:
        what.add_argument(f"--{kind}", nargs="+", metavar="TASK=DATA")
    what.add_argument("--render", type=Path, metavar="RESULT")
    what.add_argument("--beside", metavar="REVISION")
    what.add_argument("--readme", action="store_true")
    parser.add_argument("--check", action="store_true", help="with --readme: only fail if a table is stale")
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--lengths",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="files of lengths, or 'equal:N', 'uniform:LOW-HIGH' and, for sft, 'like:p3' to generate lengths",
    )
    rows.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="datasets: hub ids or JSON files")
    rows.add_argument(
        "--one-sample-per-turn",
        action="store_true",
        help="sft: cut the conversations of --dataset into turns, and keep their order",
    )
    rows.add_argument("--tokenizer", help="tokenizer of --dataset (default: the model's)")
    rows.add_argument("--batch-size", nargs="+", type=int, default=[8], help="pairs or rows per step (default: 8)")
    rows.add_argument("--max-length", type=int, default=1024, help="tokens per row (default: %(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="smollm2-135m", help=f"a folder, a hub id, or one of {', '.join(SHAPES)}: random weights"
    )
    model.add_argument("--tuning", choices=["full", "lora"], default="full")
    model.add_argument("--precomputed-reference", action="store_true", help="dpo: give its log-probs with the rows")
    measured = parser.add_argument_group("measurement")
    methods = sorted({method.name for task in BENCHMARKED.values() for method in task.methods})
    measured.add_argument("--methods", nargs="+", choices=methods, metavar="METHOD", help=f"of {', '.join(methods)}")
    measured.add_argument("--batches", type=int, default=4, help="how many of the most typical ones (default: 4)")
    measured.add_argument("--rounds", type=int, default=3, help="times to train on each (default: 3)")
    measured.add_argument("--profile", action="store_true", help="finally profile a step of each method")
    measured.add_argument("--output", type=Path, help="folder for NAME.json, NAME.md and NAME.png")
    measured.add_argument("--name", help="name of the files (default: the task)")
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """
    Run the benchmark, or one of the studies.

    Returns:
        `int`: 1 if figures disagree, a method fails or a table is stale, else 0.
    """
    given = list(sys.argv[1:] if args is None else args)
    parser = make_parser()
    options = parser.parse_args(given)
    silence()
    # One GPU of several: TRL refuses `nn.DataParallel`, which transformers would make of them
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if options.readme:
        return tables.update(ROOT, options.check)
    if options.beside:
        print(beside.page(ROOT, options.beside), end="")
        return 0
    if options.render:
        write(json.loads(options.render.read_text()), options.render.parent, options.render.stem)
        return 0
    if options.task is None:
        kind = next(kind for kind in (*OF_MACHINE, *OF_LENGTHS, *OF_MODEL) if getattr(options, kind))
        with quiet():
            return study(kind, options)
    if not options.lengths and not options.dataset:
        parser.error("one of --lengths and --dataset must say which rows to train on")
    result: dict[str, Any] = {}
    with quiet():
        for result in side_by_side(options, [*COMMAND, *given]):
            if options.output:
                write(result, options.output, options.name or options.task)
    print(report.markdown(result))
    return 0 if all(run["agree"] and only_too_large(run["failed"]) for run in result["runs"]) else 1


def only_too_large(failed: dict[str, str]) -> bool:
    """Whether methods failed only because memory ran out, which is a result, too."""
    return all(reason.startswith(torch.OutOfMemoryError.__name__) for reason in failed.values())


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context, transformers logs errors only: many trainers would all log the same."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def side_by_side(options: argparse.Namespace, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """
    Measure every source of rows at every batch size, with trainers that are built once per batch size.

    Yields the result as it grows: what was measured is safe if what comes next fails.
    """
    device = default_device()
    on_cpu = device == "cpu"
    # Before any trainer is made: TRL's preparation needs a configuration, which resets the state of all trainers
    tokenizer, maximum = options.tokenizer or options.model, options.max_length
    prepared = [
        dataset_rows(options.task, name, tokenizer, maximum, options.one_sample_per_turn) for name in options.dataset
    ]
    result: dict[str, Any] = {}
    keeps_pages = on_cpu and keep_pages()
    machine: dict[str, Any] = {"device": device, "dtype": "float32" if on_cpu else "bfloat16"}
    chosen: dict[str, Any] = {
        name: vars(options)[name] for name in ("task", "model", "tuning", "max_length", "precomputed_reference")
    }
    for batch_size in options.batch_size:
        benchmark = Benchmark(Settings(**chosen, **machine, batch_size=batch_size), options.methods)
        result = result or {**benchmark.describe(command), "keeps_pages": keeps_pages, "runs": []}
        words = benchmark.vocab_size
        made = [make_rows(options.task, source, vocab_size=words, max_length=maximum) for source in options.lengths]
        measured = []
        for rows in (*made, *prepared):
            measured.append({"batch_size": batch_size, **benchmark.run(rows, options.batches, options.rounds)})
            result["runs"].append(measured[-1])
            yield result
        if options.profile:
            for rows, run in zip((*made, *prepared), measured, strict=True):
                run["profile"] = benchmark.profile(rows)
                yield result
        benchmark.release()


def study(kind: str, options: argparse.Namespace) -> int:
    """Run a study, and write NAME.json and NAME.md: after each task, so that results survive if the next one fails."""
    measure, given = import_module(f".studies.{kind}", __package__).measure, getattr(options, kind)
    name, folder = kind, BENCHMARKS
    results: Iterable[dict[str, Any]]
    if kind in OF_MACHINE:
        folder, results, arguments = given, [measure()], [str(given)]
    elif kind in OF_LENGTHS:
        results, arguments = [measure(given)], given
    else:
        named = [(task, data) for task, _, data in (source.partition("=") for source in given)]
        # Names only: paths are those of this machine
        arguments = [f"{task}={Path(data).name}" for task, data in named] + ["--model", Path(options.model).name]
        results = after_each(partial(measure, model=options.model), named)
        if kind == "heads":
            name = "-".join(dict.fromkeys((kind, *(task for task, _ in named))))
    found, command = environment(), shlex.join([*COMMAND, f"--{kind}", *arguments])
    measured: dict[str, Any] = {}
    for measured in results:
        write({"command": command, **provenance(), "environment": found, **measured}, folder, name)
    return 0 if measured.get("agree", True) and measured.get("split", True) else 1


def after_each(measure: Callable[[str, str], Any], sources: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """All that was measured so far, after each task with its data."""
    measured = []
    for source in sources:
        measured.append(measure(*source))
        yield {"measured": measured}


def page(result: dict[str, Any], name: str) -> str:
    """The Markdown page of a result."""
    if "runs" in result:
        return report.markdown(result)
    study_of = import_module(f".studies.{name.partition('-')[0]}", __package__)
    return f"{study_of.report(result)}\n\n```\n{result['command']}\n```\n"


def write(result: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.json and NAME.md and, of methods side by side and if matplotlib is installed, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(page(result, name))
    if "runs" not in result:
        return
    try:
        report.chart(result, folder / f"{name}.png")
    except ImportError:
        print("No chart: matplotlib is not installed. `python -m scripts.benchmark --render RESULT.json` draws it.")


if __name__ == "__main__":
    raise SystemExit(main())
