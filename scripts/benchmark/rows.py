"""Rows to measure on: lengths with random tokens, or the rows of a dataset.

Random tokens make no difference to the time, only lengths and what is shared do; the prompt of a pair is the same in
its chosen and its rejected row.
"""

import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from transformers import AutoTokenizer

from trl_paddingfree.cli.load import load_rows
from trl_paddingfree.cli.turns import split_turns
from trl_paddingfree.registry import TRAINERS

from .tasks import BENCHMARKED, Length

FIRST_TOKEN = 8  # lower ids are special tokens
# Data of which we publish quantiles of the lengths only: tokens of a row, and scored tokens. P3 has 55,185 rows of 294
# P3/T0 tasks.
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)
P3 = (13, 114, 527, 2060, 6045), (2, 5, 37, 454, 718)


@dataclass(frozen=True)
class Rows:
    """Examples as TRL's collators take them, and where they come from."""

    name: str
    examples: list[dict[str, Any]]
    together: bool = False  # whether a batch is a run of neighbours, and not drawn at random

    def batches(self, batch_size: int, seed: int) -> list[list[dict[str, Any]]]:
        """Full batches of the examples, in random order."""
        rng, count = np.random.default_rng(seed), len(self.examples) // batch_size
        if self.together:
            order = (rng.permutation(count)[:, None] * batch_size + np.arange(batch_size)).ravel()
        else:
            order = rng.permutation(len(self.examples))[: count * batch_size]
        return [[self.examples[i] for i in batch] for batch in order.reshape(count, batch_size)]


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def task_of(source: str) -> str:
    """The name of the task whose columns a CSV file of lengths has."""
    with _open(Path(source)) as file:
        columns = csv.DictReader(file).fieldnames or ()
    return "dpo" if {*BENCHMARKED["dpo"].columns} <= {*columns} else "sft"


def read_lengths(source: str, task: str) -> tuple[str, list[Length]]:
    """
    Read row lengths, or make some up: gives a name for them, and the lengths.

    Args:
        source (`str`):
            A CSV file, possibly gzipped, with the task's columns;
            or `"equal:N"`: all rows have N tokens, half of them prompt; or `"uniform:LOW-HIGH"`: row lengths are drawn
            between the two, and half of each row, rounded down, is prompt; or `"like:p3"`, for SFT: lengths that are
            spread like those of P3.
        task (`str`):
            A key of `BENCHMARKED`.
    """
    if source == "like:p3" and task == "sft":
        return source, _like_p3()
    if bounds := re.fullmatch(r"(?:equal:|uniform:(\d+)-)(\d+)", source):
        high = int(bounds[2])
        drawn = np.random.default_rng(0).integers(int(bounds[1] or high), high + 1, (512, 2)).tolist()
        return source, [BENCHMARKED[task].of_two(a, b) for a, b in drawn]
    path, columns = Path(source), BENCHMARKED[task].columns
    with _open(path) as file:
        reader = csv.DictReader(file)
        if missing := set(columns) - set(reader.fieldnames or ()):
            raise ValueError(
                f"`lengths={source!r}` has the columns {reader.fieldnames}, and {task} needs {columns}: "
                f"{sorted(missing)} missing."
            )
        lengths = [tuple(int(row[name]) for name in columns) for row in reader]
    return path.name.split(".")[0], lengths


def _like_p3() -> list[Length]:
    """Lengths with the quantiles of P3; between two of them, logarithms are spread evenly."""
    rng = np.random.default_rng(0)
    rows, within = (np.exp(np.interp(rng.random(4096), SHARES, np.log(values))) for values in P3)
    return [(int(n), min(int(m), int(n) - 1)) for n, m in zip(rows, within, strict=True)]


def make_rows(
    task: str, source: str, *, vocab_size: int, max_length: int, seed: int = 0, pairs_per_prompt: int = 1
) -> Rows:
    """
    Rows of random tokens with the lengths of `source`, truncated as TRL's `"keep_start"` truncates.

    Examples that have nothing to score left are dropped, as TRL drops them. So many consecutive pairs have the prompt
    of the first of them.
    """
    name, lengths = read_lengths(source, task)
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(FIRST_TOKEN, vocab_size, n).tolist()

    examples, prompt, benchmarked = [], [], BENCHMARKED[task]
    for i, length in enumerate(lengths):
        if i % pairs_per_prompt == 0:
            prompt = tokens(benchmarked.prompt(length))
        if (example := benchmarked.make(length, tokens, prompt, max_length)) is not None:
            examples.append(example)
    return Rows(name + (f", {pairs_per_prompt} pairs per prompt" if pairs_per_prompt > 1 else ""), examples)


def dataset_rows(task: str, name: str, tokenizer: str, max_length: int, per_turn: bool = False) -> Rows:
    """
    The rows that TRL's trainer makes of a dataset: a hub name, of which the split "train" is taken, folder, or file.

    For SFT, conversations can be cut into one sample per assistant turn. Samples of a conversation then share batches.
    """
    dataset, data = load_rows(name), TRAINERS[task].task
    if per_turn:
        dataset = split_turns(dataset)
    options: dict[str, Any] = {"max_length": max_length, "truncation_mode": "keep_start"}
    prepared = data.prepare(dataset, AutoTokenizer.from_pretrained(tokenizer), **options)
    examples = [_truncated(row, max_length) for row in prepared.select_columns(data.columns)]
    return Rows(Path(name).name.split(".")[0] + per_turn * ", one sample per turn", examples, together=per_turn)


def _truncated(row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """A DPO row as TRL's collator truncates it. SFT rows are truncated when they are prepared."""
    if "prompt_ids" not in row:
        return row
    rest = max(max_length - len(row["prompt_ids"]), 0)
    return {"prompt_ids": row["prompt_ids"], **{x: row[x][:rest] for x in ("chosen_ids", "rejected_ids")}}
