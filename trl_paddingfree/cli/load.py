"""Loads data: a mixture, a hub dataset, a local folder or a local file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..hub import refuse_unreachable_data

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from trl import DatasetMixtureConfig, ScriptArguments

# The `datasets` loader of each file suffix
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
NAME_THE_DATA = "Name the data: `--dataset_name` (hub name, folder or file), or `datasets` in the YAML file."


def refuse_missing(name: str | None, advice: str) -> None:
    """Refuse a missing name, with `advice` on how to give one, and a path that does not exist."""
    if not name:
        raise ValueError(advice)
    path = Path(name)
    is_data_file = LOADERS.keys() & path.suffixes and path.parent.is_dir()
    is_on_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if (is_data_file or not is_on_hub) and not path.exists():
        raise ValueError(f"{name!r} is not a file or folder here: is it misspelt?")


def _loader_of(name: str) -> str | None:
    """The `datasets` loader of a file; `None` for a folder or a name on the hub."""
    file = Path(name)
    if not file.is_file():
        return None
    loader = next((LOADERS[suffix] for suffix in reversed(file.suffixes) if suffix in LOADERS), None)
    if loader is None:
        raise ValueError(f"{name!r} has none of the endings {', '.join(LOADERS)}: name a file that has one.")
    if not file.stat().st_size:
        raise ValueError(f"{name!r} is an empty file.")
    return loader


def broken_json(file: str) -> str:
    """Where a JSON or JSON Lines file is invalid, and why; empty if it is valid, or if that cannot be told."""
    import fsspec

    with fsspec.open(file, "rt", encoding="utf-8", compression="infer") as opened:
        for number, text in enumerate(opened if ".jsonl" in Path(file).suffixes else [opened.read()]):
            try:
                json.loads(text.strip("\n") or "0")
            except json.JSONDecodeError as error:
                # More values after the first in a `.json` file are extra data here, but `datasets` reads them as lines
                if error.msg == "Extra data":
                    return ""
                return f"line {number + error.lineno}, column {error.colno} is not valid JSON: {error.msg}."
    return ""


def load_data(script_args: "ScriptArguments", dataset_args: "DatasetMixtureConfig", seed: int) -> "DatasetDict":
    """
    Load the data that [`~trl.ScriptArguments`] or [`~trl.DatasetMixtureConfig`] name; files may be compressed.

    With `test_split_size`, data without a test split is split at random, with `seed`.
    """
    from datasets import DatasetDict, load_dataset
    from datasets.exceptions import DatasetBuildError
    from trl import get_dataset

    if dataset_args.datasets:  # TRL would split without a seed: differently in each process and each resumed run
        streaming = dataset_args.streaming
        dataset = get_dataset(replace(dataset_args, test_split_size=None))
    else:
        name, streaming = script_args.dataset_name or "", script_args.dataset_streaming
        refuse_missing(name, NAME_THE_DATA)
        loader = _loader_of(name)
        if loader is None:
            refuse_unreachable_data(name, repr(name))
        source = {"name": script_args.dataset_config} if loader is None else {"data_files": name}
        try:
            dataset = load_dataset(loader or name, **source, streaming=streaming)
        except (ValueError, DatasetBuildError) as error:
            reason = (broken_json(name) if loader == "json" else "") or f"{error}. {error.__cause__ or ''}"
            raise ValueError(f"{name!r} cannot be read: {reason}") from error
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if dataset_args.test_split_size is not None and train in dataset and test not in dataset:
        if streaming:
            raise ValueError(
                f"`--test_split_size {dataset_args.test_split_size}` cannot split a stream: do not stream, or "
                "name data with a test split."
            )
        split = dataset[train].train_test_split(test_size=dataset_args.test_split_size, seed=seed)
        dataset = DatasetDict({train: split["train"], test: split["test"]})
    return dataset


def load_rows(name: str, config: str | None = None, split: str = "train") -> "Dataset":
    """One split of a hub dataset (in a configuration), a folder or a file, read as by [`load_data`]."""
    from trl import DatasetMixtureConfig, ScriptArguments

    data = load_data(ScriptArguments(dataset_name=name, dataset_config=config), DatasetMixtureConfig(), seed=0)
    if split not in data:
        raise ValueError(f"{name} has no split {split!r}, only {list(data)}: name one with `--dataset_train_split`.")
    return data[split]
