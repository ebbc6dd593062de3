"""Data sets as TRL's trainers see them: which task they are for, and what becomes of them."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase
from trl import DatasetMixtureConfig, ScriptArguments

from . import seams
from .scripts.training import load_data

# One of these sets of columns makes a data set instruction data, by TRL's names
_INSTRUCTION_COLUMNS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"}, {"input_ids"})

# TRL's own preparation of each task's data
PREPARE = {"dpo": seams.prepare_preferences, "sft": seams.prepare_instructions}


def task_of(columns: Sequence[str]) -> str:
    """
    The task that a data set's columns fit, by TRL's dataset formats.

    Args:
        columns (`Sequence[str]`):
            Column names.

    Returns:
        `str`: `"dpo"` or `"sft"`.

    Raises:
        `ValueError`: If they fit neither, or hold images.

    Examples:
    ```python
    >>> from trl_paddingfree.data import task_of
    >>> task_of(["prompt", "chosen", "rejected", "score"]), task_of(["messages"])
    ('dpo', 'sft')

    ```
    """
    names = set(columns)
    if names & {"image", "images"}:
        raise ValueError(f"The data set has columns {sorted(names)}: images are not counted, only text is.")
    if names >= {"chosen", "rejected"}:
        return "dpo"
    if any(names >= needed for needed in _INSTRUCTION_COLUMNS):
        return "sft"
    raise ValueError(
        f"The data set has columns {sorted(names)}. Preference data needs 'chosen' and 'rejected' (and 'prompt', "
        "unless they repeat it); instruction data needs 'messages', or 'prompt' and 'completion', or 'text'. Rename "
        "yours to these, see https://huggingface.co/docs/trl/dataset_formats."
    )


def load_rows(name: str, config: str | None = None, split: str = "train") -> Dataset:
    """
    Load data as the training scripts do.

    Args:
        name (`str`):
            Hub name, folder, or a `.json`, `.jsonl`, `.csv`, `.parquet` or `.arrow` file, also compressed.
        config (`str`, *optional*):
            Configuration of a hub data set.
        split (`str`, *optional*, defaults to `"train"`):
            Split to take.

    Raises:
        `ValueError`: If there is no such split.
    """
    dataset = load_data(ScriptArguments(dataset_name=name, dataset_config=config), DatasetMixtureConfig(), seed=0)
    if split not in dataset:
        raise ValueError(
            f"{name} has no split {split!r}, it has {list(dataset)}: name one with `--dataset_train_split`."
        )
    return dataset[split]


def tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, task: str, max_length: int | None, truncation_mode: str
) -> tuple[Dataset, list[list[int]]]:
    """
    Tokenize a data set as TRL's trainers do.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows in one of TRL's formats.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        task (`str`):
            `"dpo"` or `"sft"`.
        max_length (`int`, *optional*):
            Maximum length of a sequence, in tokens.
        truncation_mode (`str`):
            `"keep_start"` or `"keep_end"`.

    Returns:
        `tuple[Dataset, list[list[int]]]`: The rows that the collator gets, and for each row of `dataset` the lengths of
        its sequences before truncation, in tokens.
    """
    prepare = PREPARE[task]
    whole = prepare(dataset, tokenizer, max_length=None, truncation_mode=truncation_mode)
    if task == "dpo":
        columns = [[len(ids) for ids in whole[name]] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        lengths = [[p + c, p + r] for p, c, r in zip(*columns, strict=True)]
    else:
        lengths = [[len(ids)] for ids in whole["input_ids"]]
    if max_length is None:
        return whole, lengths
    is_long = np.array([max(row) > max_length for row in lengths])
    kept = whole.select(np.flatnonzero(~is_long))
    if is_long.any():  # only these can lose tokens, or be dropped
        long = dataset.select(np.flatnonzero(is_long))
        cut = prepare(long, tokenizer, max_length=max_length, truncation_mode=truncation_mode)
        kept = concatenate_datasets([kept, cut])
    return kept, lengths
