"""Rows to measure on: real lengths with random tokens, lengths of one's own, or the rows of a data set.

Random tokens make no difference to the time, only lengths and what is shared do; the prompt of a pair is the same in
its chosen and its rejected row.
"""

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

# A length is a tuple (prompt, chosen, rejected) for preference data and (total, scored) for instruction data
Length = tuple[int, ...]
COLUMNS = {"dpo": ("prompt", "chosen", "rejected"), "sft": ("total", "assistant")}
FIRST_TOKEN = 8  # lower ids are special tokens


@dataclass(frozen=True)
class Rows:
    """
    Examples as TRL's collators take them, and where they come from.

    Args:
        name (`str`):
            Name of the lengths or the data set.
        examples (`list[dict[str, Any]]`):
            `prompt_ids`, `chosen_ids` and `rejected_ids` for DPO, `input_ids` and `labels` for SFT.
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
    """The task, `"dpo"` or `"sft"`, whose columns a CSV file of lengths has."""
    with _open(Path(source)) as file:
        columns = set(csv.DictReader(file).fieldnames or ())
    task = next((task for task, names in COLUMNS.items() if columns.issuperset(names)), None)
    if task is None:
        raise ValueError(f"`lengths={source!r}` has the columns {sorted(columns)}, and a task needs one of {COLUMNS}.")
    return task


def read_lengths(source: str, task: str) -> tuple[str, list[Length]]:
    """
    Read row lengths.

    Args:
        source (`str`):
            A CSV file, possibly gzipped, with the columns `prompt,chosen,rejected` (DPO) or `total,assistant` (SFT);
            or `"equal:N"`: all rows have N tokens, half of them prompt; or `"uniform:LOW-HIGH"`: row lengths are drawn
            between the two, and half of each row, rounded down, is prompt.
        task (`str`):
            `"dpo"` or `"sft"`.

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
        if task == "sft":
            return source, [(a, a - a // 2) for a, _ in drawn]
        return source, [(min(a, b) // 2, a - min(a, b) // 2, b - min(a, b) // 2) for a, b in drawn]
    path = Path(source)
    with _open(path) as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS[task]) - set(reader.fieldnames or ()):
            raise ValueError(
                f"`lengths={source!r}` has the columns {reader.fieldnames}, and {task} needs {COLUMNS[task]}: "
                f"{sorted(missing)} missing."
            )
        lengths = [tuple(int(row[name]) for name in COLUMNS[task]) for row in reader]
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
            `"dpo"` or `"sft"`.
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
            Number of consecutive pairs that have the prompt of the first of them. DPO only.
    """
    name, lengths = read_lengths(source, task)
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(FIRST_TOKEN, vocab_size, n).tolist()

    prefix, examples, prompt = tokens(common_prefix), [], []
    for i, length in enumerate(lengths):
        if task == "dpo":
            if i % pairs_per_prompt == 0:
                prompt = (prefix + tokens(length[0]))[:max_length]
            chosen, rejected = (tokens(n)[: max_length - len(prompt)] for n in length[1:])
            if len(prompt) < max_length:
                examples.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        else:
            row = prefix + tokens(length[0])
            scored = len(row) - length[1]
            if scored < max_length:
                labels = ([-100] * scored + row[scored:])[:max_length]
                examples.append({"input_ids": row[:max_length], "labels": labels})
    suffix = (f", {common_prefix} common tokens" if common_prefix else "") + (
        f", {pairs_per_prompt} pairs per prompt" if pairs_per_prompt > 1 else ""
    )
    return Rows(name + suffix, examples)


def example_lengths(example: dict[str, Any]) -> Length:
    """The length of one example, as in a length file."""
    if "prompt_ids" in example:
        return tuple(len(example[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return len(example["input_ids"]), sum(label != -100 for label in example["labels"])


def batch_lengths(batch: Sequence[dict[str, Any]]) -> list[Length]:
    """The lengths of the examples of a batch."""
    return [example_lengths(example) for example in batch]
