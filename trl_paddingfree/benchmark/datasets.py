"""The rows of a data set, prepared by TRL."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..data.load import load_rows
from ..data.turns import split_turns
from ..trainers.registry import TRAINERS
from .rows import Rows


def dataset_rows(task: str, name: str, tokenizer: str, max_length: int, per_turn: bool = False) -> Rows:
    """
    The rows that TRL's trainer makes of a data set.

    Args:
        task (`str`):
            Name of the task.
        name (`str`):
            Hub name, of which the split "train" is taken, folder, or file.
        tokenizer (`str`):
            Folder or id of the tokenizer.
        max_length (`int`):
            Longest row.
        per_turn (`bool`, *optional*, defaults to `False`):
            Whether conversations are cut into one sample per assistant turn, which keep each other's company in a
            batch. SFT only.
    """
    dataset, data = load_rows(name), TRAINERS[task].task
    if per_turn:
        dataset = split_turns(dataset)
    options: dict[str, Any] = {"max_length": max_length, "truncation_mode": "keep_start"}
    prepared = data.prepare(dataset, AutoTokenizer.from_pretrained(tokenizer), **options)
    examples = [truncated(row, max_length) for row in prepared.select_columns(data.columns)]
    return Rows(Path(name).name.split(".")[0] + per_turn * ", one sample per turn", examples, together=per_turn)


def truncated(row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """A DPO row as TRL's collator truncates it. SFT rows are truncated when they are prepared."""
    if "prompt_ids" not in row:
        return row
    rest = max(max_length - len(row["prompt_ids"]), 0)
    return {
        "prompt_ids": row["prompt_ids"],
        "chosen_ids": row["chosen_ids"][:rest],
        "rejected_ids": row["rejected_ids"][:rest],
    }
