"""TRL's own preparation of data, without a trainer, and what it leaves out."""

from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .task import Task

logger = logging.get_logger(__name__)


def tokenize(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    max_length: int | None,
    truncation_mode: str,
    in_order: bool = False,
) -> tuple[Dataset, list[list[int]]]:
    """
    A data set tokenized as TRL's trainers do: the rows that the collator gets, and for each row of `dataset` the
    lengths of its sequences before truncation, in tokens. Rows that are cut come last, unless they are to stay
    `in_order`, which takes longer.
    """
    if task.prepare is None:
        raise ValueError(f"The task {task.name!r} has no `prepare`: give it a function that tokenizes raw data.")
    whole = task.prepare(dataset, tokenizer, max_length=None, truncation_mode=truncation_mode)
    lengths = task.sequence_lengths(whole)
    if max_length is None:
        return whole, lengths
    is_long = np.array([max(row) > max_length for row in lengths])
    if in_order:  # nothing says which of several rows are dropped: all are cut, or none
        is_long[:] = is_long.any()
    kept = whole.select(np.flatnonzero(~is_long))
    if is_long.any():  # only these can lose tokens, or be dropped
        long = dataset.select(np.flatnonzero(is_long))
        cut = task.prepare(long, tokenizer, max_length=max_length, truncation_mode=truncation_mode)
        kept = concatenate_datasets([kept, cut])
    return kept, lengths


def log_dropped(
    name: str,
    before: Any,
    after: Any,
    max_length: int | None,
    reason: str = "leaves nothing to learn from",
    examples_of_row: int = 1,
) -> None:
    """
    Say how many examples of the `name` data, of which it makes `examples_of_row` of each row, TRL left out for the
    `reason` of their length. Refuses data of which none is left.
    """
    if not isinstance(before, Dataset) or len(after) == (examples := examples_of_row * len(before)):
        return
    dropped = (
        f"The {name} data: dropped {examples - len(after)} of {examples} examples, which "
        f"`max_length={max_length}` {reason}."
    )
    if not len(after):
        raise ValueError(f"{dropped} Raise `max_length`.")
    logger.warning(f"{dropped} Raise `max_length` to keep them.")
