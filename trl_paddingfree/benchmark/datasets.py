"""The rows of a data set, prepared by TRL."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .rows import Rows

COLUMNS = {"dpo": ["prompt_ids", "chosen_ids", "rejected_ids"], "sft": ["input_ids", "labels"]}


def dataset_rows(task: str, name: str, tokenizer: str, max_length: int) -> Rows:
    """
    The rows that TRL's trainer makes of a data set.

    Args:
        task (`str`):
            `"dpo"` or `"sft"`.
        name (`str`):
            A hub id, of which the split "train" is taken, or a JSON file, possibly gzipped.
        tokenizer (`str`):
            Folder or id of the tokenizer.
        max_length (`int`):
            Longest row.
    """
    if Path(name).exists():
        dataset = load_dataset("json", data_files=name, split="train")
    else:
        dataset = load_dataset(name, split="train")
    trainer_class, config_class = {"dpo": (DPOTrainer, DPOConfig), "sft": (SFTTrainer, SFTConfig)}[task]
    config: Any = config_class(
        output_dir=tempfile.mkdtemp(prefix="trl_paddingfree_benchmark_"),
        max_length=max_length,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    kwargs = {"ref_model": _small_model()} if task == "dpo" else {}
    trainer = trainer_class(
        model=_small_model(),
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        **kwargs,
    )
    examples = [truncated(row, max_length) for row in trainer.train_dataset.select_columns(COLUMNS[task])]
    return Rows(Path(name).name.split(".")[0], examples)


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


def _small_model() -> Any:
    """A model for the trainer that prepares the rows. It is never run."""
    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
