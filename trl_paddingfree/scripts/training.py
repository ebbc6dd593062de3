"""What the scripts have in common: loading the data, training, and the closing summary."""

import time
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict, load_dataset
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from trl import get_dataset, get_peft_config, get_quantization_config

from ..memory import peak_memory

# What `datasets` calls the loader of each kind of file
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def load_data(script_args: Any, dataset_args: Any, seed: int) -> DatasetDict:
    """
    The data that the arguments name: a mixture, a hub data set, a local folder or a local file.

    Args:
        script_args ([`~trl.ScriptArguments`]):
            `dataset_name` may be a `.json`, `.jsonl`, `.csv`, `.parquet` or `.arrow` file, also compressed.
        dataset_args ([`~trl.DatasetMixtureConfig`]):
            `test_split_size` also splits a data set that has no test split of its own.
        seed (`int`):
            Seed of that split.
    """
    if dataset_args.datasets:
        return get_dataset(dataset_args)
    name, streaming = script_args.dataset_name, script_args.dataset_streaming
    if not name:
        raise ValueError("Name the data: `--dataset_name` (hub name, folder or file), or `datasets` in the YAML file.")
    file = Path(name)
    if file.is_file():
        loader = next((LOADERS[suffix] for suffix in reversed(file.suffixes) if suffix in LOADERS), None)
        if loader is None:
            raise ValueError(f"`--dataset_name {name}` ends in none of {', '.join(LOADERS)}: name a file that does.")
        dataset = load_dataset(loader, data_files=name, streaming=streaming)
    else:
        dataset = load_dataset(name, name=script_args.dataset_config, streaming=streaming)
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if dataset_args.test_split_size is not None and train in dataset and test not in dataset:
        if streaming:
            raise ValueError(
                f"`--test_split_size {dataset_args.test_split_size}` cannot split a stream: leave out "
                "`--dataset_streaming`, or name data with a test split."
            )
        split = dataset[train].train_test_split(test_size=dataset_args.test_split_size, seed=seed)
        dataset = DatasetDict({train: split["train"], test: split["test"]})
    return dataset


def train(trainer_class: type, script_args: Any, training_args: Any, model_args: Any, dataset_args: Any) -> None:
    """Load, train, save and summarise, with the arguments of TRL's scripts."""
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    if not model_args.model_name_or_path:
        raise ValueError("Name the model: `--model_name_or_path` (hub name or folder).")
    dataset = load_data(script_args, dataset_args, training_args.seed)
    evaluates = training_args.eval_strategy != "no"
    needed = [script_args.dataset_train_split, *([script_args.dataset_test_split] if evaluates else [])]
    for split in needed:
        if split not in dataset:
            raise ValueError(
                f"The data has no split {split!r}, it has {list(dataset)}. Set `--dataset_train_split` and "
                "`--dataset_test_split`, or `--test_split_size 0.05` to split some off for evaluation."
            )
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if script_args.ignore_bias_buffers:
        ignored = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainer.model, ignored)
    started = time.perf_counter()
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    summarize(trainer, result.metrics, time.perf_counter() - started)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()


def summarize(trainer: Any, metrics: dict[str, float], seconds: float) -> None:
    """Print what the run took and what it computed, on the main process."""
    counts = trainer.total_counts()
    memory, gigabytes = peak_memory(trainer.accelerator.device)
    if not trainer.accelerator.is_main_process:
        return
    examples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    figures = {
        "time": f"{seconds:.1f} s",
        "optimizer steps": f"{trainer.state.global_step}",
        "final loss": f"{metrics['train_loss']:.4f} (mean over the run)",
        f"{trainer.example_name} per second": f"{examples / seconds:.2f}",
        "real tokens per second": f"{counts.real / seconds:,.0f}",
        "tokens computed": f"{counts.computed:,}",
        "slots of the padded batches": f"{counts.padded:,}",
        "computed, of padded": f"{counts.computed / counts.padded:.1%}",
        memory: f"{gigabytes:.2f} GiB",
    }
    if counts.distinct:
        figures["computed, of distinct tokens"] = f"{counts.computed / counts.distinct:.1%}"
    table = Table(title=f"Trained by {trainer.method}", show_header=False, title_justify="left")
    for name, value in figures.items():
        table.add_row(name, value)
    Console().print(table)
