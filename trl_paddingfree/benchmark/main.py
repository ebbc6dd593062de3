"""The command line of the benchmark."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The arguments of the benchmark."""
    from .shapes import SHAPES
    from .tasks import BENCHMARKED

    parser = argparse.ArgumentParser(
        prog=prog,
        description="Set padded TRL and padding-free training side by side: same model, rows and seed, stepped in turn "
        "in one process. No speed is reported where losses disagree.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("task", choices=BENCHMARKED)
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--lengths",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="CSV files (.gz too) of row lengths with the columns prompt,chosen,rejected (dpo) or total,assistant "
        "(sft); 'equal:N' or 'uniform:LOW-HIGH' makes lengths up",
    )
    rows.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="data sets: hub ids or JSON files")
    rows.add_argument(
        "--one-sample-per-turn",
        action="store_true",
        help="sft: cut the conversations of --dataset, kept in their order",
    )
    rows.add_argument("--tokenizer", help="tokenizer of --dataset: the model's, if that has one")
    rows.add_argument("--batch-size", nargs="+", type=int, default=[8], help="pairs or rows per step")
    rows.add_argument("--max-length", type=int, default=1024)
    rows.add_argument("--common-prefix", type=int, default=0, help="tokens that all rows begin with")
    rows.add_argument("--pairs-per-prompt", type=int, default=1)
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="smollm2-135m", help=f"a folder, a hub id, or one of {', '.join(SHAPES)}")
    model.add_argument("--tuning", choices=["full", "lora", "qlora"], default="full")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="float32 on the CPU, bfloat16 on a GPU")
    model.add_argument("--device", choices=["cpu", "cuda"], help="a GPU, if there is one")
    model.add_argument("--no-gradient-checkpointing", dest="gradient_checkpointing", action="store_false")
    model.add_argument(
        "--precomputed-reference", action="store_true", help="dpo: give reference log-probs with the rows"
    )
    model.add_argument("--liger", action="store_true", help="Liger kernels in all methods")
    model.add_argument("--torch-compile", action="store_true")
    model.add_argument("--learning-rate", type=float, help="TRL's default")
    measured = parser.add_argument_group("measurement")
    methods = {method.name for task in BENCHMARKED.values() for method in task.methods}
    measured.add_argument("--methods", nargs="+", choices=sorted(methods))
    measured.add_argument("--trl-attention", help="attention of TRL's own methods: the fastest there is")
    measured.add_argument("--batches", type=int, default=4, help="how many of the most typical batches")
    measured.add_argument("--rounds", type=int, default=3, help="times to train on each")
    measured.add_argument("--warmup", type=int, help="rounds that do not count: 1 on a GPU, 0 on the CPU")
    measured.add_argument("--profile", action="store_true", help="also profile a step of each method")
    measured.add_argument("--seed", type=int, default=0)
    measured.add_argument("--output", type=Path, help="folder for NAME.json, NAME.md and NAME.png")
    measured.add_argument("--name", help="name of the files: the task")
    return parser


def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """
    Run the benchmark.

    Args:
        args (`Sequence[str]`, *optional*):
            Command-line arguments. Defaults to those of the process.
        prog (`str`, *optional*):
            Name of the command, for its help.

    Returns:
        `int`: 0 if all methods agree on every loss, else 1.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    given = list(sys.argv[1:] if args is None else args)
    parser = make_parser(prog)
    options = parser.parse_args(given)
    if not options.lengths and not options.dataset:
        parser.error("one of --lengths and --dataset must say which rows to train on")
    from .report import markdown, write

    result: dict[str, Any] = {}
    with quiet():
        for result in run(options, ["trl-paddingfree", "bench", *given]):
            if options.output:
                write(result, options.output, options.name or options.task)
    print(markdown(result))
    return 0 if all(measured["agree"] for measured in result["runs"]) else 1


@contextmanager
def quiet() -> Iterator[None]:
    """Within this context, transformers only speaks of errors: many trainers would all say the same."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def run(options: argparse.Namespace, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """
    Measure every source of rows at every batch size, with trainers that are built once per batch size.

    Yields the result as it grows, after each source: what was measured is safe if a later source fails.
    """
    import torch

    from .datasets import dataset_rows
    from .environment import keep_pages
    from .methods import Settings
    from .run import Benchmark, release

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    warmup = options.warmup if options.warmup is not None else int(device == "cuda")
    # Before any trainer is made: TRL's preparation needs a configuration, which resets the state of all trainers
    datasets = [
        dataset_rows(
            options.task, name, options.tokenizer or options.model, options.max_length, options.one_sample_per_turn
        )
        for name in options.dataset
    ]
    result: dict[str, Any] = {}
    keeps_pages = device == "cpu" and keep_pages()
    for batch_size in options.batch_size:
        settings = Settings(
            task=options.task,
            model=options.model,
            device=device,
            dtype=options.dtype or ("bfloat16" if device == "cuda" else "float32"),
            tuning=options.tuning,
            batch_size=batch_size,
            max_length=options.max_length,
            gradient_checkpointing=options.gradient_checkpointing,
            precomputed_reference=options.precomputed_reference,
            liger=options.liger,
            torch_compile=options.torch_compile,
            learning_rate=options.learning_rate,
            seed=options.seed,
        )
        benchmark = Benchmark(settings, options.methods, options.trl_attention)
        result = result or {**benchmark.describe(command), "keeps_pages": keeps_pages, "runs": []}
        for rows in [*made_rows(options, benchmark.vocab_size), *datasets]:
            measured = benchmark.run(rows, options.batches, options.rounds, warmup, options.profile)
            result["runs"].append({"batch_size": batch_size, **measured})
            yield result
        release(benchmark)


def made_rows(options: argparse.Namespace, vocab_size: int) -> list[Any]:
    """Rows of random tokens, of the lengths of every source."""
    from .rows import make_rows

    return [
        make_rows(
            options.task,
            source,
            vocab_size=vocab_size,
            max_length=options.max_length,
            seed=options.seed,
            common_prefix=options.common_prefix,
            pairs_per_prompt=options.pairs_per_prompt,
        )
        for source in options.lengths
    ]
