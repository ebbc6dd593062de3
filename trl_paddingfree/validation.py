"""Bad input: what is refused, with what to change, and what is counted and said, before anything is computed."""

import os
from reprlib import repr as short
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from peft import PeftModel, PromptLearningConfig
from transformers import ProcessorMixin
from transformers.utils import logging
from trl import SFTConfig

logger = logging.get_logger(__name__)

PAIR_COLUMNS = ("prompt", "chosen", "rejected")


def refuse_unflattenable(arguments: dict[str, Any], collator: type) -> None:
    """
    Refuse trainer arguments that cannot be combined with flat batches.

    Args:
        arguments (`dict[str, Any]`):
            Arguments of the trainer.
        collator (`type`):
            The collator class that gives flat batches.

    Raises:
        `ValueError`: Naming the argument, its value, and what to change.
    """
    config = arguments["args"]
    _refuse_prompt_learning(arguments["model"], arguments.get("peft_config"))
    _refuse_foreign_collator(arguments.get("data_collator"), collator)
    _refuse_sequence_parallelism(config)
    eval_dataset = arguments.get("eval_dataset")
    eval_datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for dataset in (arguments.get("train_dataset"), *eval_datasets):
        _refuse_vision(dataset)
    if arguments.get("data_collator") is None:
        _refuse_missing_pad_token(arguments.get("processing_class"), config)
    for option in ("dispatch_batches", "split_batches"):
        if getattr(config.accelerator_config, option):
            raise ValueError(
                f"`accelerator_config={{'{option}': True}}` cuts batches along their first dimension, which a flat "
                f"batch does not have. Leave `{option}` out, or set `padding_free=False`."
            )
    config.accelerator_config.dispatch_batches = False  # the default dispatches the batches of a streaming data set
    if config.per_device_train_batch_size == 1 and isinstance(config, SFTConfig) and not config.packing:
        logger.warning(
            "`padding_free=True` with `per_device_train_batch_size=1`: there is next to nothing to gain, because a "
            "batch of one example has next to no padding. Use a larger batch and fewer `gradient_accumulation_steps`."
        )


def _refuse_prompt_learning(model: Any, peft_config: Any) -> None:
    if isinstance(model, PeftModel):
        peft_config = model.active_peft_config
    if isinstance(peft_config, PromptLearningConfig):
        raise ValueError(
            f"`peft_config` of type {type(peft_config).__name__} puts virtual tokens before every row, which a flat "
            "batch cannot hold. Use LoRA, or set `padding_free=False`."
        )


def _refuse_foreign_collator(data_collator: Any, collator: type) -> None:
    """TRL's own collator is taken over. A subclass of it may do anything, a subclass of ours gives flat batches."""
    if data_collator is None or isinstance(data_collator, collator) or type(data_collator) in collator.__bases__:
        return
    raise ValueError(
        f"`data_collator` is a {type(data_collator).__name__}, which gives no flat batch. Leave it out, pass a "
        f"`trl_paddingfree.{collator.__name__}` or a subclass of it, or set `padding_free=False`."
    )


def _refuse_sequence_parallelism(config: Any) -> None:
    parallelism = config.parallelism_config
    if parallelism is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        parallelism = ParallelismConfig()  # what `accelerate launch` was told, which accelerate reads later
    for size, kind in (("cp_size", "context"), ("sp_size", "sequence")):
        if parallelism is not None and getattr(parallelism, size) > 1:
            raise ValueError(
                f"`parallelism_config` with `{size}={getattr(parallelism, size)}`: {kind} parallelism cuts rows into "
                f"parts of equal length, and a flat batch is not made of rows. Set `{size}=1`, or `padding_free=False`."
            )


def _column_names(dataset: Any) -> list[str]:
    """A streaming data set may know its columns from its first example only."""
    return dataset.column_names or list(next(iter(dataset), {}))


def _refuse_vision(dataset: Any) -> None:
    found = [] if dataset is None else [name for name in _column_names(dataset) if name in ("image", "images")]
    if found:
        raise ValueError(
            f"The data has a column `{found[0]}`: vision data is not supported without padding. Leave the column out "
            f"with `dataset.remove_columns('{found[0]}')` to train on the text, or set `padding_free=False`."
        )


def _refuse_missing_pad_token(processing_class: Any, config: Any) -> None:
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if tokenizer is None or config.pad_token is not None:
        return
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has neither a `pad_token` nor an `eos_token` to stand in for "
            "it. Set `tokenizer.pad_token` to one of its tokens and pass it as `processing_class`."
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
    columns = _column_names(dataset)
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
    problems = [f"`{column}` is {problem}" for column, text in texts.items() if (problem := _problem(text))]
    if not problems and len(set(map(type, texts.values()))) > 1:
        problems = [", ".join(f"`{column}` is a {type(text).__name__}" for column, text in texts.items())]
    if problems:
        raise ValueError(
            f"Row {index} of the {name} data: {'; '.join(problems)}. All of a row's texts must be strings, or all "
            "lists of messages. Correct the row, or leave it out with `dataset.filter`."
        )
    return {}


def _problem(text: Any) -> str:
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


def log_dropped(name: str, before: Any, after: Any, max_length: int | None) -> None:
    """
    Say how many examples of the `name` data TRL left out because truncation left them nothing to learn from.

    Raises:
        `ValueError`: If none is left.
    """
    if not isinstance(before, Dataset) or len(after) == len(before):
        return
    dropped = (
        f"The {name} data: dropped {len(before) - len(after)} of {len(before)} examples, which "
        f"`max_length={max_length}` leaves nothing to learn from."
    )
    if not len(after):
        raise ValueError(f"{dropped} Raise `max_length`.")
    logger.warning(f"{dropped} Raise `max_length` to keep them.")
