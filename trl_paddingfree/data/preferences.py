"""Preference data as the user gave it: what is refused, with the row and the fix, and what is counted and said."""

from collections.abc import Sequence
from reprlib import repr as short
from typing import Any

from datasets import Dataset
from transformers.utils import logging

logger = logging.get_logger(__name__)

PAIR_COLUMNS = ("prompt", "chosen", "rejected")


def column_names(dataset: Any) -> list[str]:
    """A streaming data set may know its columns from its first example only."""
    return dataset.column_names or list(next(iter(dataset), {}))


def refuse_unread(dataset: Any, name: str, task: str, *formats: Sequence[str]) -> None:
    """
    Refuse data in which TRL would miss a column.

    Args:
        dataset (`Dataset` or `IterableDataset`), name (`str`):
            As for [`check_preferences`].
        task (`str`):
            What reads the data.
        *formats (`Sequence[str]`):
            The columns of each format that it reads.

    Raises:
        `ValueError`: If the data has the columns of none.
    """
    columns = column_names(dataset)
    if not any(set(needed) <= set(columns) for needed in formats):
        reads = ", or ".join(" and ".join(f"`{column}`" for column in needed) for needed in formats)
        raise ValueError(
            f"The {name} data has no columns that {task} reads, only {columns}. It reads {reads}. Rename yours with "
            "`dataset.rename_column`."
        )


def check_preferences(dataset: Any, tokenizer: Any, name: str, num_proc: int | None = None) -> Any:
    """
    Refuse preference data that TRL would stumble over, and count what it trains on though it teaches little.

    Nothing is taken out: padded TRL trains on an empty prompt, an empty completion and an identical pair, so we do.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Data as the user gave it.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer.
        name (`str`):
            Name of the data in messages.
        num_proc (`int`, *optional*):
            Number of processes that read the data.

    Returns:
        `Dataset` or `IterableDataset`: The same data. A streaming data set is checked row by row as it is read, and
        nothing is counted.

    Raises:
        `ValueError`: If a column is missing, if a row holds anything but text, or if text has no end to learn.
    """
    columns = column_names(dataset)
    if missing := [column for column in ("chosen", "rejected") if column not in columns]:
        raise ValueError(
            f"The {name} data has no column `{missing[0]}`, its columns are {columns}. DPO reads `prompt`, `chosen` "
            "and `rejected`. Rename yours with `dataset.rename_column`, or pass preference data."
        )
    if tokenizer.eos_token is None and isinstance(next(iter(dataset))["chosen"], str):
        raise ValueError(
            f"The {name} data is plain text, and the tokenizer ({type(tokenizer).__name__}) has no `eos_token` to end "
            "a completion with. Set `tokenizer.eos_token` and pass the tokenizer as `processing_class`."
        )
    if not isinstance(dataset, Dataset):
        return dataset.map(_refuse_bad_pair, with_indices=True, fn_kwargs={"name": name})
    oddities = dataset.map(
        _pair_oddities,
        with_indices=True,
        fn_kwargs={"name": name},
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        desc=f"Checking {name} dataset",
    )
    counts = {oddity: sum(oddities[oddity]) for oddity in oddities.column_names}
    if found := [f"{count} with {oddity}" for oddity, count in counts.items() if count]:
        logger.warning(f"The {name} data: {', '.join(found)}, of {len(dataset)} pairs. They are kept, as in TRL.")
    return dataset


def _pair_oddities(example: dict[str, Any], index: int, name: str) -> dict[str, bool]:
    """What is odd about a pair that is trained on all the same."""
    _refuse_bad_pair(example, index, name)
    completions = [example["chosen"], example["rejected"]]
    if "prompt" not in example:  # it is part of both, and the completions are what comes last
        completions = [text if isinstance(text, str) else text[-1:] for text in completions]
    return {
        "an empty prompt": "prompt" in example and _is_empty(example["prompt"]),
        "an empty completion": any(map(_is_empty, completions)),
        "identical chosen and rejected": example["chosen"] == example["rejected"],
    }


def _refuse_bad_pair(example: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    texts = {column: example[column] for column in PAIR_COLUMNS if column in example}
    problems = [f"`{column}` is {problem}" for column, text in texts.items() if (problem := message_problem(text))]
    if not problems and len(set(map(type, texts.values()))) > 1:
        problems = [", ".join(f"`{column}` is a {type(text).__name__}" for column, text in texts.items())]
    if problems:
        raise ValueError(
            f"Row {index} of the {name} data: {'; '.join(problems)}. All of a row's texts must be strings, or all "
            "lists of messages. Correct the row, or leave it out with `dataset.filter`."
        )
    return {}


def refuse_bad_messages(dataset: Any, name: str) -> None:
    """
    Refuse conversations whose first row TRL would not know for one: it would look for a column of text instead.

    Args:
        dataset (`Dataset` or `IterableDataset`), name (`str`):
            As for [`check_preferences`].

    Raises:
        `ValueError`: Naming the column and what is wrong with it.
    """
    first: dict[str, Any] = next(iter(dataset), {})
    if isinstance(messages := first.get("messages"), list) and (problem := message_problem(messages)):
        raise ValueError(
            f"Row 0 of the {name} data: `messages` is {problem}. A conversation is a list of messages, each with a "
            "`role` and a `content`. Correct the rows."
        )


def message_problem(text: Any) -> str:
    """Why `text` is neither a string nor a list of messages; empty if it is one."""
    if isinstance(text, str):
        return ""
    if not isinstance(text, list):
        return short(text)
    if not text:
        return "an empty list"
    for message in text:
        if not isinstance(message, dict) or "role" not in message:
            return f"a list with {short(message)}, which has no role"
        if not isinstance(message.get("content"), str | list) and not _says_something_else(message):
            return f"a list with a message whose content is {short(message.get('content'))}"
    return ""


def _says_something_else(message: dict[str, Any]) -> bool:
    """Whether a message without content calls tools or the like."""
    return message.get("content") is None and any(v for k, v in message.items() if k not in ("role", "content"))


def _is_empty(text: str | list[dict[str, Any]]) -> bool:
    if isinstance(text, str):
        return not text.strip()
    return not any(message.get("content") or _says_something_else(message) for message in text)
