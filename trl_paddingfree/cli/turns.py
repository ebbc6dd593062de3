"""Cuts conversations into one row per assistant turn, each learned in the context that it has at inference."""

from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from transformers.utils import logging
from trl import maybe_convert_to_chatml

from ..core.data.lengths import AnyDataset, column_names, has_known_lengths
from ..messages import message_problem

logger = logging.get_logger(__name__)

# Columns that each new row gets; columns of these names in the data are replaced
NEW = ("prompt", "completion")
# Temporary column: the index of the conversation that a row is cut from, for counting and shuffling conversations
INDEX = "index_of_the_conversation"
Columns = dict[str, list[Any]]  # of some rows


def split_turns(dataset: AnyDataset, seed: int | None = None, num_proc: int | None = None) -> AnyDataset:
    """
    Cut conversations into one row per assistant turn, in TRL's conversational prompt-completion format.

    The prompt of a row is everything before its turn, and TRL renders it with the chat template as inference would.
    Templates that drop the thinking of earlier turns (such as Qwen3's) drop it there, too, and each turn is learned
    with its own. The rows of a conversation stay adjacent, each a continuation of the one before: with
    `prefix_sharing=True` and `train_sampling_strategy="sequential"`, what they have in common is computed once.

    Args:
        dataset (`Dataset`, `DatasetDict`, or a streaming one):
            Rows with a conversation in `messages`, or in `conversations` (also with `from` and `value`, as TRL reads
            it). Further columns (`tools`, `chat_template_kwargs`) are carried over to each row.
        seed (`int`, *optional*):
            Seed to shuffle the conversations. By default, they stay in order.
        num_proc (`int`, *optional*):
            Number of processes to cut with. Streaming data is cut as it is read.

    Returns:
        The same type as `dataset`: a row with the columns `prompt` and `completion` for each assistant message that
        follows another message. What follows the last assistant message is left out.

    Raises:
        `ValueError`: If there are no conversations to cut (it names the columns, or the row and what is wrong with it),
            or if there is a `seed` for a stream.

    >>> from datasets import Dataset
    >>> from trl_paddingfree import split_turns
    >>> said = [("user", "1 + 1?"), ("assistant", "2"), ("user", "And 1 more?"), ("assistant", "3")]
    >>> conversation = [{"role": role, "content": content} for role, content in said]
    >>> rows = split_turns(Dataset.from_list([{"messages": conversation}]))
    >>> [(len(row["prompt"]), row["completion"][0]["content"]) for row in rows]
    [(1, '2'), (3, '3')]
    """
    if isinstance(dataset, dict):
        return type(dataset)({name: split_turns(split, seed, num_proc) for name, split in dataset.items()})
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(f"{dataset!r} is not a dataset: load it with `datasets.load_dataset`.")
    columns, is_stream = column_names(dataset), not isinstance(dataset, Dataset)
    if is_stream or has_known_lengths(dataset):  # a format such as NumPy's; a transform makes rows
        dataset = dataset.with_format(None)
    if not {"messages", "conversations"} & set(columns):
        raise ValueError(
            f"The data has the columns {columns}, and turns are cut from `messages` or `conversations`. Rename yours "
            "with `dataset.rename_column`, or do not cut."
        )
    for name in ("input_ids", "labels", "image", "images"):
        if name in columns:
            raise ValueError(
                f"The data has a column `{name}`, whose {'images' if 'image' in name else 'tokens'} belong to whole "
                f"conversations: they cannot be cut into turns. Leave it out with "
                f"`dataset.remove_columns({name!r})`, or do not cut."
            )
    if is_stream and seed is not None:
        raise ValueError(
            f"`seed={seed}` shuffles all conversations, and a stream never has them all: leave it out, and shuffle "
            "with `dataset.shuffle(seed=..., buffer_size=...)` before you cut."
        )
    options: dict = {} if is_stream else {"num_proc": num_proc, "desc": "Cutting conversations into turns"}
    if "messages" not in columns:
        dataset = dataset.map(maybe_convert_to_chatml, remove_columns="conversations", **options)
        columns = column_names(dataset)
    kept = [column for column in columns if column not in ("messages", "conversations", *NEW)]
    if dataset.features is not None:  # else the first batch sets types: no tool calls there, none later
        types = {column: dataset.features[column] for column in kept} | dict.fromkeys(NEW, dataset.features["messages"])
        options["features"] = Features(types | {INDEX: Value("int64")})
    options |= {"remove_columns": columns, "fn_kwargs": {"kept": kept}}  # the new rows bring those that are kept
    turns = dataset.map(_cut, batched=True, with_indices=True, **options)
    if not is_stream:
        indices = turns.select_columns([INDEX]).with_format("arrow")[:][INDEX].to_numpy()
        if number := len(dataset) - len(np.unique(indices)):
            lost = f"{number} of {len(dataset)} conversations have no assistant turn after a prompt"
            if number == len(dataset):
                roles = sorted({str(message["role"]) for messages in dataset[:10]["messages"] for message in messages})
                raise ValueError(
                    f"{lost}. The first have the roles {roles}, and turns are those of 'assistant': rename them."
                )
            logger.warning(f"{lost}: they give no row.")
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(dataset))
            turns = turns.select(np.argsort(order[indices], kind="stable"))
    return turns.remove_columns([INDEX])


def _cut(batch: Columns, indices: list[int], kept: list[str]) -> Columns:
    """The rows of some conversations."""
    rows = []
    for i, (index, messages) in enumerate(zip(indices, batch["messages"], strict=True)):
        problem = "a string" if isinstance(messages, str) else message_problem(messages)
        if problem:
            raise ValueError(
                f"Row {index}: `messages` is {problem}, which cannot be cut into turns. A conversation is a list of "
                "messages, each with a `role` and a `content`. Correct the row, or leave it out with "
                "`dataset.filter`."
            )
        others = {column: batch[column][i] for column in kept}
        for turn, message in enumerate(messages):
            if turn and message["role"] == "assistant":  # a turn that opens the conversation answers no prompt
                rows.append({**others, "prompt": messages[:turn], "completion": [message], INDEX: index})
    return {name: [row[name] for row in rows] for name in (*kept, *NEW, INDEX)}
