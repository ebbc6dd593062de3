"""The runs of the quick start, on a small Llama from scratch or your own model and data, and what it prints of them."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Column, Table
from trl import extract_prompt

from ..data.load import load_rows
from ..data.task import Task, task_of
from ..memory.device import has_accelerator
from ..trainers.registry import TRAINERS
from .charts import drawn, plot_runs
from .model import instruction_data, make_model, make_tokenizer, preference_data
from .side_by_side import Trajectory, differences, train_watched

PADDED, OURS = "trl_padded", "padding_free"
LABELS = {PADDED: "TRL, padded", OURS: "padding-free"}
# Largest difference of two losses that is still rounding. In float32 a step differs by a few units of 1e-7, and Adam
# lets that grow over the steps; bfloat16 keeps 3 digits of every log-probability, and a loss adds hundreds of them.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 2e-3, 0.1
SFT_BATCH_SIZE = 16
# How often a model from scratch sees each example. It is too small to generalise, but learns these by heart
EPOCHS = 3
# GiB by which two runs may differ on the CPU and say nothing: the allocator keeps memory of the first for the second.
# Accelerators count exactly
MEMORY_NOISE = 0.1
Summary = dict[str, Any]  # what is written as JSON


def texts(dataset: Dataset) -> Iterator[str]:
    """Every text of a data set: strings, and the contents of messages."""
    for row in dataset:
        for value in row.values():
            turns = value if isinstance(value, list) else [{"content": value}]
            contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
            yield from (content for content in contents if isinstance(content, str))


def start_from_scratch(task: Task, data: Dataset, args: argparse.Namespace, console: Console) -> str:
    """Make a tokenizer and a small Llama, and before DPO train it on answers by SFT. Returns the folder of both."""
    folder = str(Path(args.output_dir) / "model")
    tokenizer = make_tokenizer(texts(data))
    model = make_model(tokenizer, args.seed)
    console.print(f"A Llama of {model.num_parameters() / 1e6:.1f} million parameters, from scratch.")
    if task.name == "sft":
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    answers = instruction_data(args.seed) if args.dataset_name is None else as_instructions(data)
    options = {
        **options_of(args, folder, args.sft_steps, SFT_BATCH_SIZE),
        "learning_rate": 3e-3,
        "adam_beta2": 0.95,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "cosine",
        "warmup_steps": args.sft_steps // 10,
    }
    answers = answers.select(range(min(len(answers), args.sft_steps * SFT_BATCH_SIZE)))
    made = {"model": model, "processing_class": tokenizer, "train_dataset": answers}
    run = train_watched("sft", True, console, "run 1 of 3: SFT, padding-free", options, **made)
    run.trainer.save_model(folder)
    return folder


def options_of(args: argparse.Namespace, output_dir: str, steps: int, batch_size: int) -> dict[str, object]:
    """Options of the trainer that all runs have."""
    sizes = {"max_steps": steps, "per_device_train_batch_size": batch_size, "max_length": args.max_length}
    return {"output_dir": output_dir, "seed": args.seed, **sizes}


def as_instructions(pairs: Dataset) -> Dataset:
    """The preferred answers of preference pairs, as prompt-completion rows."""
    pairs = pairs if "prompt" in pairs.column_names else pairs.map(extract_prompt)
    return pairs.select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")


def compare(task: Task, model: str, data: Dataset, args: argparse.Namespace, console: Console) -> dict[str, Trajectory]:
    """Train `model` by this package and by padded TRL, on the same batches."""
    options = options_of(args, str(Path(args.output_dir) / task.name), args.steps, args.batch_size)
    num_rows = args.steps * args.batch_size
    if args.model is None:
        options |= {"learning_rate": 2e-4, "gradient_checkpointing": False}
        num_rows = num_rows // EPOCHS + 1
    data = data.select(range(min(len(data), num_rows)))
    runs, done = {}, args.model is None and task.name == "dpo"  # runs so far: SFT of a model from scratch, or none
    # Ours runs first: if the first run is slower because it warms up, that does not favour this package
    for number, name in enumerate((OURS, PADDED), 1 + done):
        title = f"run {number} of {2 + done}: {task.name.upper()}, {LABELS[name]}"
        lora = LoraConfig(task_type="CAUSAL_LM") if args.use_peft else None
        given = {"model": model, "train_dataset": data, "peft_config": lora}
        runs[name] = train_watched(task.name, name == OURS, console, title, options, **given)
    runs[PADDED].trainer = None  # frees its model
    return runs


def summarize(task: Task, runs: dict[str, Trajectory]) -> Summary:
    """What the comparison found, as plain numbers."""
    ours, padded = runs[OURS], runs[PADDED]
    counts = ours.trainer.total_counts()
    difference = differences(padded.log_history, ours.log_history)["loss"]
    tolerance = BFLOAT16_TOLERANCE if ours.trainer.args.bf16 else FLOAT32_TOLERANCE
    return {
        "task": task.name,
        "method": ours.trainer.method,
        "steps": len(ours.losses),
        "first_loss": {PADDED: padded.losses[0], OURS: ours.losses[0]},
        "last_loss": {PADDED: padded.losses[-1], OURS: ours.losses[-1]},
        "seconds": {PADDED: padded.seconds, OURS: ours.seconds},
        # Other processes on the machine do not change this, while they make a run longer. It does not count GPU time
        "core_seconds": None if has_accelerator() else {PADDED: padded.core_seconds, OURS: ours.core_seconds},
        "tokens_computed": {PADDED: counts.padded, OURS: counts.computed},
        # Shares of the tokens that padded TRL computes: padding, and those that another row of the batch has, too
        "saved_by_padding_free": 1 - counts.real / counts.padded,
        "saved_by_sharing": (counts.real - counts.computed) / counts.padded,
        "peak_memory_gib": {PADDED: padded.memory, OURS: ours.memory},
        "memory_noise_gib": 0.0 if has_accelerator() else MEMORY_NOISE,
        "speed_up": padded.seconds / ours.seconds,
        "loss_difference": difference,
        "loss_tolerance": tolerance,
        "equal": difference <= tolerance,
    }


def print_summary(summary: Summary, console: Console) -> None:
    """The comparison as a table."""
    title = f"{summary['task'].upper()}, {summary['steps']} steps on the same batches"
    heads = (Column(LABELS[name], justify="right") for name in (PADDED, OURS))
    table = Table("", *heads, "", title=title, title_justify="left")

    def saved(name: str) -> str:
        padded = summary[name][PADDED]
        saving = 1 - summary[name][OURS] / padded if padded else 0.0
        return f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"

    def speed(name: str) -> str:
        speed_up = summary[name][PADDED] / summary[name][OURS]
        return f"{speed_up:.1f}x faster" if speed_up >= 1 else f"{1 / speed_up:.1f}x slower"

    rows = [
        ("first loss", "first_loss", "{:.5f}", ""),
        ("last loss", "last_loss", "{:.5f}", f"differ by {summary['loss_difference']:.0e}"),
        ("time", "seconds", "{:.1f} s", speed("seconds")),
    ]
    if summary["core_seconds"]:
        rows.append(("time on cores", "core_seconds", "{:.1f} s", speed("core_seconds")))
    memory = saved("peak_memory_gib") if tells_memory(summary) else "too little to tell"
    rows.append(("tokens computed", "tokens_computed", "{:,}", saved("tokens_computed")))
    rows.append(("peak memory", "peak_memory_gib", "{:.2f} GiB", memory))
    for title, name, form, remark in rows:
        table.add_row(title, form.format(summary[name][PADDED]), form.format(summary[name][OURS]), remark)
    console.print(table)
    console.print(
        f"How: {summary['method']}. Of the tokens that padded TRL computes, {summary['saved_by_padding_free']:.0%} are "
        f"padding, and {summary['saved_by_sharing']:.0%} are computed in another row of the batch already."
    )
    if summary["core_seconds"]:
        console.print("Time on cores leaves out what other processes on this machine took.")


def tells_memory(summary: Summary) -> bool:
    """Whether the memory of the runs differs by more than noise."""
    padded, ours = (summary["peak_memory_gib"][name] for name in (PADDED, OURS))
    return abs(padded - ours) > summary["memory_noise_gib"]


def draw(runs: dict[str, Trajectory], summary: Summary, path: Path) -> None:
    """The losses of every step over each other, and the figures side by side, relative to padded TRL."""
    bars = {"time, s": ("seconds", 1), "tokens": ("tokens_computed", 1)}
    if tells_memory(summary):
        bars["memory, MiB"] = ("peak_memory_gib", 1024)
    figures = {
        title: {label: factor * summary[key][name] for name, label in LABELS.items()}
        for title, (key, factor) in bars.items()
    }
    losses = {label: runs[name].losses for name, label in LABELS.items()}
    plot_runs(losses, figures, summary["task"].upper(), path)


def run(args: argparse.Namespace) -> int:
    """Run the quick start with options of the command line. Exit code 0 if the losses are equal up to rounding."""
    console, output_dir = Console(stderr=args.json), Path(args.output_dir)
    if args.model is None:
        torch.set_num_threads(1)  # on a model this small, several threads mostly wait for each other
    if not output_dir.exists():
        output_dir.mkdir(parents=True)
        (output_dir / ".gitignore").write_text("*\n")
    if args.dataset_name is None:
        data = preference_data(args.seed)
    else:
        data = load_rows(args.dataset_name, args.dataset_config, args.dataset_train_split).shuffle(seed=args.seed)
    task = task_of(data.column_names, [TRAINERS[name].task for name in ("dpo", "sft")])
    model = args.model or start_from_scratch(task, data, args, console)
    runs = compare(task, model, data, args, console)
    summary = summarize(task, runs)
    result = json.dumps(summary, indent=2) + "\n"
    (output_dir / "result.json").write_text(result)
    if args.json:
        sys.stdout.write(result)
    else:
        print_summary(summary, console)
    drawn(lambda: draw(runs, summary, output_dir / "chart.png"), output_dir / "chart.png", console)
    if not summary["equal"]:
        console.print(
            f"The losses differ by {summary['loss_difference']:.1e}, which is more than rounding "
            f"({summary['loss_tolerance']:.0e}). Please report it with the output of `trl-paddingfree env`."
        )
    return 0 if summary["equal"] else 1
