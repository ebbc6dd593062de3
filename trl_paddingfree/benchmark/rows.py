"""Rows to measure on: real lengths with random tokens, lengths of one's own, or the rows of a data set.

Random tokens make no difference to the time, only lengths and what is shared do; the prompt of a pair is the same in
its chosen and its rejected row.
"""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .tasks import BENCHMARKED, Length

FIRST_TOKEN = 8  # lower ids are special tokens


@dataclass(frozen=True)
class Rows:
    """
    Examples as TRL's collators take them, and where they come from.

    Args:
        name (`str`):
            Name of the lengths or the data set.
        examples (`list[dict[str, Any]]`):
            As the collator of the task takes them.
        together (`bool`, *optional*, defaults to `False`):
            Whether a batch holds neighbours, rather than examples drawn at random.
    """

    name: str
    examples: list[dict[str, Any]]
    together: bool = False

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
        columns = set(csv.DictReader(file).fieldnames or ())
    task = next((name for name, task in BENCHMARKED.items() if columns.issuperset(task.columns)), None)
    if task is None:
        needed = {name: task.columns for name, task in BENCHMARKED.items()}
        raise ValueError(f"`lengths={source!r}` has the columns {sorted(columns)}, and a task needs one of {needed}.")
    return task


def read_lengths(source: str, task: str) -> tuple[str, list[Length]]:
    """
    Read row lengths.

    Args:
        source (`str`):
            A CSV file, possibly gzipped, with the task's columns;
            or `"equal:N"`: all rows have N tokens, half of them prompt; or `"uniform:LOW-HIGH"`: row lengths are drawn
            between the two, and half of each row, rounded down, is prompt.
        task (`str`):
            A key of `BENCHMARKED`.

    Returns:
        `tuple[str, list[Length]]`: A name for the lengths, and the lengths.

    Raises:
        `ValueError`: If a file lacks a column.
    """
    kind, _, numbers = source.partition(":")
    if kind in ("equal", "uniform"):
        bounds = numbers.split("-")
        if len(bounds) != (1 if kind == "equal" else 2) or not all(map(str.isdecimal, bounds)):
            raise ValueError(f"`lengths={source!r}` must be 'equal:N', 'uniform:LOW-HIGH' or the name of a file.")
        low, high = int(bounds[0]), int(bounds[-1])
        drawn = np.random.default_rng(0).integers(low, high + 1, (512, 2)).tolist()
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


def make_rows(
    task: str,
    source: str,
    *,
    vocab_size: int,
    max_length: int,
    seed: int = 0,
    common_prefix: int = 0,
    pairs_per_prompt: int = 1,
) -> Rows:
    """
    Rows of random tokens with the lengths of `source`, truncated as TRL's `"keep_start"` truncates.

    Args:
        task (`str`):
            A key of `BENCHMARKED`.
        source (`str`):
            See [`read_lengths`].
        vocab_size (`int`):
            Tokens are drawn below this id.
        max_length (`int`):
            Longest row. Examples that have nothing to score left are dropped, as TRL drops them.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the tokens.
        common_prefix (`int`, *optional*, defaults to `0`):
            Number of tokens, the same in all rows, to put before each row: a system prompt, or a list of tools.
        pairs_per_prompt (`int`, *optional*, defaults to `1`):
            Number of consecutive examples that have the prompt of the first of them.
    """
    name, lengths = read_lengths(source, task)
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(FIRST_TOKEN, vocab_size, n).tolist()

    prefix, examples, prompt, benchmarked = tokens(common_prefix), [], [], BENCHMARKED[task]
    for i, length in enumerate(lengths):
        if i % pairs_per_prompt == 0:
            prompt = prefix + tokens(benchmarked.prompt(length))
        if (example := benchmarked.make(length, tokens, prompt, max_length)) is not None:
            examples.append(example)
    suffix = (f", {common_prefix} common tokens" if common_prefix else "") + (
        f", {pairs_per_prompt} pairs per prompt" if pairs_per_prompt > 1 else ""
    )
    return Rows(name + suffix, examples)
