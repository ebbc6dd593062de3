"""Runs the quick start, on a small Llama from scratch or your own model and data, and prints the comparison."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from rich.console import Console
from transformers.utils import logging
from trl import extract_prompt

from ...core.device import has_accelerator
from ...registry import TRAINERS, task_of
from ..load import load_rows
from ..tables import right, table
from .charts import drawn, plot_runs
from .model import make_model, make_tokenizer, preference_data
from .side_by_side import Figures, train_watched

PADDED, OURS = "trl_padded", "padding_free"
LABELS = {PADDED: "TRL, padded", OURS: "padding-free"}
# Largest difference between losses that rounding explains. In float32 a step differs by a few units of 1e-7, and Adam
# lets that grow over the steps; bfloat16 keeps 3 digits of every log-probability, and a loss adds hundreds of them.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 2e-3, 0.1
# Options of the SFT run before DPO
SFT_OPTIONS = {
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "adam_beta2": 0.95,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "cosine",
}
# How often a model from scratch sees each example. It is too small to generalize, but memorizes these
EPOCHS = 3
# Differences in memory on the CPU that are noise, in GiB: the second run reuses what the allocator kept of the first
MEMORY_NOISE = 0.1


def texts(dataset: Dataset) -> Iterator[str]:
    """Every text of a dataset: strings, and the contents of messages."""
    for row in dataset:
        for value in row.values():
            for turn in value if isinstance(value, list) else [{"content": value}]:
                if isinstance(turn, dict) and isinstance(text := turn.get("content"), str):
                    yield text


def train_all(args: argparse.Namespace, console: Console) -> tuple[str, Any, dict[str, Figures]]:
    """Train both ways on the same batches. Returns the data's task, this package's trainer, and both runs' figures."""
    if args.dataset_name is None:
        data = preference_data(args.seed)
    else:
        data = load_rows(args.dataset_name, args.dataset_config, args.dataset_train_split).shuffle(seed=args.seed)
    task = task_of(data.column_names, [TRAINERS[name].task for name in ("dpo", "sft")]).name
    numbers, total = count(1), 3 if args.model is None and task == "dpo" else 2

    def train(task: str, name: str, data: Dataset, options: dict[str, Any], **given):
        title = f"run {next(numbers)} of {total}: {task.upper()}, {LABELS[name]}"
        common = {"output_dir": str(Path(args.output_dir) / task), "seed": args.seed, "max_length": args.max_length}
        rows = data.select(range(len(data))[: options["max_steps"] * options["per_device_train_batch_size"]])
        return train_watched(task, name == OURS, console, title, common | options, train_dataset=rows, **given)

    model, options = args.model, {"max_steps": args.steps, "per_device_train_batch_size": args.batch_size}
    if model is None:  # a tokenizer and a small Llama, which learns the answers by SFT before DPO
        model, tokenizer = str(Path(args.output_dir) / "model"), make_tokenizer(texts(data))
        llama = make_model(tokenizer, args.seed)
        console.print(f"A Llama of {llama.num_parameters() / 1e6:.1f} million parameters, from scratch.")
        if task == "dpo":
            pairs = data if "prompt" in data.column_names else data.map(extract_prompt)
            answers = pairs.select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")
            own = {"output_dir": model, "max_steps": args.sft_steps, "warmup_steps": args.sft_steps // 10}
            train("sft", OURS, answers, SFT_OPTIONS | own, model=llama, processing_class=tokenizer)
        llama.save_pretrained(model)
        tokenizer.save_pretrained(model)
        options |= {"learning_rate": 2e-4, "gradient_checkpointing": False}
        data = data.select(range(len(data))[: args.steps * args.batch_size // EPOCHS + 1])
    trainers, runs = {}, {}
    # Ours runs first: if the first run is slower because it warms up, that does not favor this package
    for name in (OURS, PADDED):
        lora = LoraConfig(task_type="CAUSAL_LM") if args.use_peft else None
        trainers[name], runs[name] = train(task, name, data, options, model=model, peft_config=lora)
    return task, trainers[OURS], {name: runs[name] for name in LABELS}


def summarize(task: str, trainer: Any, runs: dict[str, Figures]) -> Figures:
    """What the comparison found, as plain numbers for JSON."""
    counts, on_cpu = trainer.total_counts(), not has_accelerator()
    both = {name: {run: figures[name] for run, figures in runs.items()} for name in runs[OURS]}
    losses, seconds = both.pop("losses"), both["seconds"]
    difference = max(abs(a - b) / max(abs(a), 1) for a, b in zip(losses[PADDED], losses[OURS], strict=True))
    tolerance = BFLOAT16_TOLERANCE if trainer.args.bf16 else FLOAT32_TOLERANCE
    return {
        "task": task,
        "method": trainer.method,
        "steps": len(losses[OURS]),
        **both,
        # Other processes on the machine make a run longer, but do not change this. GPU time is not counted
        "core_seconds": both["core_seconds"] if on_cpu else None,
        "tokens_computed": {PADDED: counts.padded, OURS: counts.computed},
        # Shares of the tokens that padded TRL computes: padding, and those that another row of the batch also has
        "saved_by_padding_free": 1 - counts.real / counts.padded,
        "saved_by_sharing": (counts.real - counts.computed) / counts.padded,
        "memory_noise_gib": MEMORY_NOISE if on_cpu else 0.0,
        "speed_up": seconds[PADDED] / seconds[OURS],
        "loss_difference": difference,
        "loss_tolerance": tolerance,
        "equal": difference <= tolerance,
    }


def tells_memory(summary: Figures) -> bool:
    """Whether the memory of the runs differs by more than noise."""
    padded, ours = summary["peak_memory_gib"].values()
    return abs(padded - ours) > summary["memory_noise_gib"]


def saved(padded: float, ours: float) -> str:
    """How much less a run takes than padded TRL, or how much more."""
    saving = 1 - ours / padded if padded else 0.0
    return f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"


def faster(padded: float, ours: float) -> str:
    """How much faster a run is than padded TRL, or how much slower."""
    return f"{padded / ours:.1f}x faster" if padded >= ours else f"{ours / padded:.1f}x slower"


def print_summary(summary: Figures, console: Console) -> None:
    """The comparison as a table."""
    title = f"{summary['task'].upper()}, {summary['steps']} steps on the same batches"
    rows = []
    for name, key, form, remark in (
        ("first loss", "first_loss", "{:.5f}", ""),
        ("last loss", "last_loss", "{:.5f}", f"differ by {summary['loss_difference']:.0e}"),
        ("time", "seconds", "{:.1f} s", faster),
        ("CPU time", "core_seconds", "{:.1f} s", faster),
        ("tokens computed", "tokens_computed", "{:,}", saved),
        ("peak memory", "peak_memory_gib", "{:.2f} GiB", saved if tells_memory(summary) else "too little to tell"),
    ):
        if summary[key]:  # CPU time is `None` on GPUs
            both = summary[key].values()
            rows.append([name, *map(form.format, both), remark(*both) if callable(remark) else remark])
    console.print(table(title, ["", *right(*LABELS.values()), ""], rows))
    console.print(
        f"How: {summary['method']}. Of the tokens that padded TRL computes, {summary['saved_by_padding_free']:.0%} "
        f"are padding, and {summary['saved_by_sharing']:.0%} repeat the start of another row."
    )
    if summary["core_seconds"]:
        console.print("CPU time leaves out the time of other processes on this machine.")


def draw(runs: dict[str, Figures], summary: Figures, path: Path) -> None:
    """Plot the losses of both runs, and their figures side by side, relative to padded TRL."""
    figures = {"time, s": summary["seconds"], "tokens": summary["tokens_computed"]}
    if tells_memory(summary):
        figures["memory, MiB"] = {name: 1024 * gib for name, gib in summary["peak_memory_gib"].items()}
    plot_runs({label: runs[name]["losses"] for name, label in LABELS.items()}, figures, summary["task"].upper(), path)


def run(args: argparse.Namespace) -> int:
    """Run the quick start with command-line options. Returns 0 if the losses are equal up to rounding, otherwise 1."""
    console, folder = Console(stderr=args.json), Path(args.output_dir)
    if args.model is None:  # a small model and its data are prepared within seconds
        disable_progress_bars()
        logging.disable_progress_bar()
        torch.set_num_threads(1)  # on a model this small, several threads mostly wait for each other
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):  # before anything is trained
        raise ValueError(f"`--output_dir {folder}` is not a folder that can be written to: name another.")
    task, trainer, runs = train_all(args, console)
    summary, chart = summarize(task, trainer, runs), folder / "chart.png"
    result = json.dumps(summary, indent=2) + "\n"
    (folder / "result.json").write_text(result)
    if args.json:
        sys.stdout.write(result)
    else:
        print_summary(summary, console)
    drawn(lambda: draw(runs, summary, chart), chart, console)
    if summary["equal"]:
        return 0
    console.print(
        f"The losses differ by {summary['loss_difference']:.1e}, which is more than rounding "
        f"({summary['loss_tolerance']:.0e}). Please report it with the output of `trl-paddingfree env`."
    )
    return 1
