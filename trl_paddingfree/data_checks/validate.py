"""Checks the user's data before TRL prepares it: bad rows are refused by number, odd ones are counted and logged."""

from collections.abc import Iterable, Sequence
from reprlib import repr as short
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import types
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..core.data.lengths import AnyDataset, Example, column_names, has_known_lengths, tables_of, token_lengths
from ..core.data.task import RAW_COLUMNS, Task
from ..core.flat.batch import IGNORE_INDEX
from ..core.spelling import did_you_mean
from ..messages import has_other_content, message_problem
from .columns import FIX

logger = logging.get_logger(__name__)

# Roles that chat templates know
_ROLES = ("assistant", "developer", "function", "system", "tool", "user")


def refuse_unread(dataset: AnyDataset, name: str, task: str, *formats: Sequence[str]) -> None:
    """Refuse data that fits none of the `formats` that `task` reads, and rows with `None` in a column that it reads."""
    columns = column_names(dataset)
    read = next(filter(set(columns).issuperset, formats), None)
    if read is None:
        reads = ", or ".join(" and ".join(f"`{column}`" for column in needed) for needed in formats)
        raise ValueError(
            f"The {name} data has no columns that {task} reads, only {columns}. It reads {reads}. Rename yours with "
            "`dataset.rename_column`."
        )
    _refuse_none(dataset, name, read if has_known_lengths(dataset) else ())


def _refuse_none(dataset: AnyDataset, name: str, columns: Iterable[str]) -> None:
    """Refuse rows with `None` in one of the `columns`."""
    for column in columns:
        nulls = [table[column].is_null().to_numpy() for table in tables_of(dataset, column)]
        if any(map(np.any, nulls)):
            raise ValueError(f"Row {np.concatenate(nulls).argmax()} of the {name} data: `{column}` is None. {FIX}")


def refuse_unread_instructions(dataset: AnyDataset, name: str, text_field: str = "text") -> None:
    """Refuse data that SFT cannot read. `input_ids` take precedence, and in TRL a prompt needs a completion."""
    columns = column_names(dataset)
    if "input_ids" in columns:
        return
    formats = [["prompt", "completion"], ["input_ids"], ["messages"], [text_field], ["conversations"]]
    if "prompt" in columns and "completion" not in columns:
        others = ", ".join(f"`{column}`" for [column] in formats[1:])
        raise ValueError(
            f"The {name} data has no columns that SFT reads, only {columns}. It reads `prompt` and `completion`, or, "
            f"without a `prompt`, one of {others}. Rename yours with `dataset.rename_column`, or remove the `prompt`."
        )
    refuse_unread(dataset, name, "SFT", *formats)
    if text_field in columns:
        return
    if not {"messages", "completion"} & {*columns}:
        first = next(iter(dataset))["conversations"]
        if not (isinstance(first, list) and first and {"from", "value"} <= {*first[0]}):
            raise ValueError(
                f"`conversations` of the {name} data have no `from` and `value`, which TRL reads under this name only. "
                "Rename the column with `dataset.rename_column('conversations', 'messages')`."
            )


def refuse_misspelt_roles(dataset: AnyDataset, name: str, task: Task) -> None:
    """
    Refuse roles in columns of raw data that TRL reads, if they are close to one that templates know: a misspelt role
    changes what is learned from.
    """
    is_raw = has_known_lengths(dataset) and not has_known_lengths(dataset, task.token_columns)
    for column in dataset.column_names if is_raw else ():
        if column not in (*RAW_COLUMNS, *task.reads):  # others are for reward functions, or for nobody
            continue
        kind = dataset.features.arrow_schema.field(column).type
        if not types.is_list(kind) or not types.is_struct(kind.value_type) or "role" not in kind.value_type.names:
            continue
        for table in tables_of(dataset, column):
            for role in pc.unique(pc.struct_field(pc.list_flatten(table[column]), "role")).to_pylist():
                is_word = isinstance(role, str) and role.isalpha() and role.lower() not in _ROLES
                if is_word and (meant := did_you_mean(role, _ROLES)):
                    raise ValueError(f"`{column}` of the {name} data has messages with the role {role!r}.{meant}")


def refuse_missing_prompts(dataset: AnyDataset, name: str) -> None:
    """Refuse pairs of messages if the first has no prompt, neither in a column nor as a common first message."""
    first = next(iter(dataset))
    ours, other = first["chosen"], first["rejected"]
    is_chat = "prompt" not in first and isinstance(ours, list) and isinstance(other, list)
    if is_chat and (min(len(ours), len(other)) == 1 or (ours and other and ours[0] != other[0])):
        raise ValueError(
            f"The {name} data has no `prompt`, only {list(first)}, and `chosen` and `rejected` begin with different "
            "messages. Rename the column of the prompt with `dataset.rename_column`."
        )


def first_prompts(dataset: AnyDataset) -> list[Any]:
    """The first prompt of the data and, unless it is a stream, the first text that is empty."""
    prompts = [next(iter(dataset))["prompt"]]
    if has_known_lengths(dataset) and isinstance(prompts[0], str):
        prompts += [""] * any(pc.any(pc.equal(each["prompt"], "")).as_py() for each in tables_of(dataset, "prompt"))
    return prompts


def refuse_empty_prompts(prompts: Sequence[Any], tokens: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that have become no tokens: there is nothing to generate from, and TRL fails without saying so."""
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not len(ids):
            raise ValueError(
                f"The prompt {short(prompt)} has no tokens, so there is nothing to generate from. Leave it out with "
                "`dataset.filter`."
            )


def log_unread(dataset: AnyDataset, name: str, task: Task, *also: str) -> None:
    """Log which columns of raw data TRL does not read, such as a prompt under another name."""
    read = {*RAW_COLUMNS, *task.reads, *task.columns, *also}
    columns = (dataset.column_names or []) if task.reads else []
    if unread := [f"`{column}`" for column in columns if column not in read]:
        has_pairs = {"chosen", "rejected"} <= set(columns) and "prompt" not in columns
        prompt = " Without a `prompt`, it is the common start of `chosen` and `rejected`." if has_pairs else ""
        logger.warning(
            f"The {name} data has columns that {task.name.upper()} does not read: {', '.join(unread)}.{prompt}"
        )


def check_preferences(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, name: str, args: Any) -> AnyDataset:
    """
    Refuse preference data that TRL would fail on, and log how many pairs have little to learn from. `args` is TRL's
    configuration: its first process checks the data, and the others read what it cached.

    Nothing is removed: padded TRL trains on empty prompts, empty completions and identical pairs, so we do, too.
    Returns the data. A stream is checked row by row as it is read, and nothing is counted.
    """
    if tokenizer.eos_token is None and isinstance(next(iter(dataset))["chosen"], str):
        raise ValueError(
            f"The {name} data is plain text, and the tokenizer ({type(tokenizer).__name__}) has no `eos_token` to end "
            "a completion with. Set `tokenizer.eos_token` and pass the tokenizer as `processing_class`."
        )
    if not isinstance(dataset, Dataset):
        return dataset.map(_refuse_bad_pair, with_indices=True, fn_kwargs={"name": name})
    with args.main_process_first(desc=f"checking the {name} data"):
        oddities = dataset.map(
            _pair_oddities,
            with_indices=True,
            fn_kwargs={"name": name},
            remove_columns=dataset.column_names,
            num_proc=args.dataset_num_proc,
            desc=f"Checking {name} dataset",
        )
    names = oddities.column_names
    if listed := [f"{count} with {oddity}" for oddity in names if (count := sum(oddities[oddity]))]:
        logger.warning(f"The {name} data: {', '.join(listed)}, of {len(dataset)} pairs. They are kept, as in TRL.")
    return dataset


def _pair_oddities(example: Example, index: int, name: str) -> dict[str, bool]:
    """What is odd about a pair that is kept nevertheless."""
    _refuse_bad_pair(example, index, name)
    completions = [example["chosen"], example["rejected"]]
    if "prompt" not in example:  # the prompt begins both conversations, whose last message is the completion
        completions = [text if isinstance(text, str) else text[-1:] for text in completions]
    return {
        "an empty prompt": "prompt" in example and _is_empty(example["prompt"]),
        "an empty completion": any(map(_is_empty, completions)),
        "identical chosen and rejected": example["chosen"] == example["rejected"],
    }


def _refuse_bad_pair(example: Example, index: int, name: str) -> Example:
    texts = {column: example[column] for column in ("prompt", "chosen", "rejected") if column in example}
    problems = [f"`{column}` is {problem}" for column, text in texts.items() if (problem := message_problem(text))]
    if not problems and len(set(map(type, texts.values()))) > 1:
        problems = [", ".join(f"`{column}` is a {type(text).__name__}" for column, text in texts.items())]
    if problems:
        raise ValueError(
            f"Row {index} of the {name} data: {'; '.join(problems)}. All of a row's texts must be strings, or all "
            f"lists of messages. {FIX}"
        )
    return {}


def _is_empty(text: str | list[Example]) -> bool:
    if isinstance(text, str):
        return not text.strip()
    return not any(message.get("content") or has_other_content(message) for message in text)


def refuse_bad_tokens(dataset: AnyDataset, name: str) -> None:
    """Refuse tokenized data with wrong types, `None`, or not one label per token. The collator checks streams."""
    if not (columns := _token_columns(dataset)):
        return
    for column in columns:
        kind = dataset.features.arrow_schema.field(column).type
        if not _is_list(kind) or not types.is_integer(kind.value_type):
            raise ValueError(
                f"`{column}` of the {name} data is of type {kind}, and tokens are lists of whole numbers. Cast them "
                f"with `dataset.cast_column('{column}', List(Value('int64')))`."
            )
    _refuse_none(dataset, name, columns)
    lengths = token_lengths(dataset, columns).T
    if (wrong := np.flatnonzero(lengths[0] != lengths[-1])).size:
        row = wrong[0]
        raise ValueError(
            f"Row {row} of the {name} data: `labels` has {lengths[1][row]} entries, `input_ids` has "
            f"{lengths[0][row]}: there is one label for each token, -100 where it is not learned. {FIX}"
        )


def _is_list(kind: pa.DataType) -> bool:
    """Whether values of Arrow's type `kind` are lists, of any of its three kinds."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def refuse_unknown_tokens(dataset: AnyDataset, name: str, columns: Sequence[str], size: int, known: str) -> None:
    """
    Refuse tokens in `columns` of prepared data beyond the `size` rows of a model's embeddings, and say which are
    `known`. Of a stream, the first row is looked at.
    """
    where = f"`{{column}}` of the {name} data"
    if not has_known_lengths(dataset):
        refuse_unknown_tokens_of(next(iter(dataset), {}), where, columns, size, known)
        return
    for column in columns:
        for table in tables_of(dataset, column) if column in dataset.column_names else ():
            _refuse_unknown(table[column], column, where, size, known)


def refuse_unknown_tokens_of(row: Example, where: str, columns: Sequence[str], size: int, known: str) -> None:
    """The same for a single row, with the words `where` it is."""
    for column in columns:
        if row.get(column):
            _refuse_unknown(pa.array(row[column]), column, where, size, known)


def _refuse_unknown(tokens: Any, column: str, where: str, size: int, known: str) -> None:
    while _is_list(tokens.type):
        tokens = pc.list_flatten(tokens)
    if column == "labels":
        tokens = tokens.filter(pc.not_equal(tokens, IGNORE_INDEX))
    least, most = pc.min_max(tokens).as_py().values()
    if least is not None and not 0 <= least <= most < size:
        raise ValueError(f"{where.format(column=column)} has the token {least if least < 0 else most}, and {known}")


def _token_columns(dataset: AnyDataset) -> list[str]:
    """`input_ids`, and `labels` if there are any, of tokenized data; none of a stream."""
    if not has_known_lengths(dataset, ["input_ids"]):
        return []
    return [column for column in ("input_ids", "labels") if column in dataset.column_names]


def log_dropped(
    name: str,
    before: AnyDataset,
    after: AnyDataset,
    max_length: int | None,
    reason: str = "leaves nothing to learn from",
    per_row: int = 1,
) -> None:
    """Log how many examples TRL dropped for their length, with `per_row` of them per row; refuse if none is left."""
    if not isinstance(before, Dataset) or len(after) == (examples := per_row * len(before)):
        return
    why = f"which `max_length={max_length}` {reason}"
    dropped = f"The {name} data: dropped {examples - len(after)} of {examples} examples, {why}."
    if not len(after):
        raise ValueError(f"{dropped} Raise `max_length`.")
    logger.warning(f"{dropped} Raise `max_length` to keep them.")
