"""The quick start: padded TRL and this package train the same model on the same batches, side by side, anywhere.

Without arguments: a small Llama from scratch, on text that every Python has. Or your own model and data.
"""

import argparse
import gc
import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, extract_prompt

from .configs import PaddingFreeDPOConfig, PaddingFreeSFTConfig
from .dpo import PaddingFreeDPOTrainer
from .plot import plot_runs
from .sft import PaddingFreeSFTTrainer
from .small_model import make_model, make_tokenizer
from .stdlib_data import instruction_data, preference_data
from .waste import load_rows, task_of

PADDED, OURS = "TRL, padded", "padding-free"
TRAINERS: dict[str, dict[str, tuple[type, type]]] = {
    "dpo": {OURS: (PaddingFreeDPOTrainer, PaddingFreeDPOConfig), PADDED: (DPOTrainer, DPOConfig)},
    "sft": {OURS: (PaddingFreeSFTTrainer, PaddingFreeSFTConfig), PADDED: (SFTTrainer, SFTConfig)},
}
# Largest difference of two losses that is still rounding. In float32 a step differs by a few units of 1e-7, and Adam
# lets that grow over the steps; bfloat16 keeps 3 digits of every log-probability, and a loss adds hundreds of them.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 2e-3, 0.1
SFT_BATCH_SIZE = 16
# A model from scratch sees each example so many times: too small to learn a rule, it learns these
EPOCHS = 3
# Often enough to see the largest tensors of a step live
SAMPLE_SECONDS = 0.002


@dataclass
class Run:
    """What one training run reported."""

    losses: list[float] = field(default_factory=list)
    seconds: float = math.nan
    memory: float = math.nan  # GiB at the peak, above the level before the run
    trainer: Any = None


class MemoryWatch(threading.Thread):
    """Watches the resident memory of this process."""

    def __init__(self):
        super().__init__(daemon=True)
        self.process, self.done = psutil.Process(), threading.Event()
        self.before = self.peak = self.process.memory_info().rss

    def run(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.process.memory_info().rss)


@contextmanager
def watch_memory(run: Run) -> Iterator[None]:
    """Within this context, find how much more memory is in use at the peak than at the start."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        run.memory = (torch.cuda.max_memory_allocated() - before) / 2**30
        return
    watch = MemoryWatch()
    watch.start()
    try:
        yield
    finally:
        watch.done.set()
        watch.join()
    run.memory = (watch.peak - watch.before) / 2**30


class ShowSteps(TrainerCallback):
    """Moves a progress bar along with the optimizer's steps."""

    def __init__(self, progress: Progress, description: str):
        self.progress, self.description = progress, description

    def on_train_begin(self, args, state, control, **kwargs):
        self.task = self.progress.add_task(self.description, total=state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            description = f"{self.description}, loss {logs['loss']:.4f}"
            self.progress.update(self.task, completed=state.global_step, description=description)


def train(trainer_class: type, config_class: type, console: Console, description: str, **kwargs: Any) -> Run:
    """
    Train and watch.

    Args:
        trainer_class (`type`):
            TRL's trainer or ours.
        config_class (`type`):
            Its configuration.
        console ([`~rich.console.Console`]):
            Where to show the steps.
        description (`str`):
            What to call them there.
        **kwargs:
            Arguments of the trainer; `options` are those of the configuration.
    """
    run, on_gpu = Run(), torch.cuda.is_available()
    defaults = {
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = config_class(**{**defaults, **kwargs.pop("options")})
    with watch_memory(run), Progress(console=console) as progress:
        trainer = trainer_class(args=args, **kwargs)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ShowSteps(progress, description))
        trainer.train()
    history = trainer.state.log_history
    run.losses = [entry["loss"] for entry in history if "loss" in entry]
    run.seconds = history[-1]["train_runtime"]
    run.trainer = trainer
    return run


def texts(dataset: Dataset) -> Iterator[str]:
    """Every text of a data set: strings, and the contents of messages."""
    for row in dataset:
        for value in row.values():
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from (turn["content"] for turn in value if isinstance(turn, dict) and "content" in turn)


def start_from_scratch(data: Dataset, args: argparse.Namespace, console: Console) -> str:
    """
    Train a tokenizer and a small Llama on the data. Preference pairs come after a short SFT on the answers.

    Returns:
        `str`: The folder of the model.
    """
    folder = str(Path(args.output_dir) / "model")
    tokenizer = make_tokenizer(texts(data))
    model = make_model(tokenizer, args.seed)
    console.print(f"A Llama of {model.num_parameters() / 1e6:.1f} million parameters, from scratch.")
    if task_of(data.column_names) == "sft":
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    answers = instruction_data(args.seed) if args.dataset_name is None else as_instructions(data)
    options = {
        "output_dir": folder,
        "max_steps": args.sft_steps,
        "per_device_train_batch_size": SFT_BATCH_SIZE,
        "max_length": args.max_length,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": args.sft_steps // 10,
        "seed": args.seed,
    }
    run = train(
        PaddingFreeSFTTrainer,
        PaddingFreeSFTConfig,
        console,
        "SFT, padding-free",
        model=model,
        processing_class=tokenizer,
        train_dataset=answers.select(range(min(len(answers), args.sft_steps * SFT_BATCH_SIZE))),
        options=options,
    )
    run.trainer.save_model(folder)
    return folder


def as_instructions(pairs: Dataset) -> Dataset:
    """The preferred answers of preference pairs, as prompt-completion rows."""
    pairs = pairs if "prompt" in pairs.column_names else pairs.map(extract_prompt)
    return pairs.select_columns(["prompt", "chosen"]).rename_column("chosen", "completion")


def compare(model: str, data: Dataset, args: argparse.Namespace, console: Console) -> dict[str, Run]:
    """Train `model` by this package and by padded TRL, on the same batches."""
    task = task_of(data.column_names)
    options: dict[str, Any] = {
        "output_dir": str(Path(args.output_dir) / task),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "max_length": args.max_length,
        "seed": args.seed,
    }
    num_rows = args.steps * args.batch_size
    if args.model is None:
        options["learning_rate"] = 2e-4
        num_rows = num_rows // EPOCHS + 1
    else:
        options["gradient_checkpointing"] = True
    data = data.select(range(min(len(data), num_rows)))
    runs = {}
    # Ours first: whatever a first run pays for warming up, it is not padded TRL that pays it
    for name, classes in TRAINERS[task].items():
        runs[name] = train(
            *classes,
            console,
            f"{task.upper()}, {name}",
            model=model,
            train_dataset=data,
            peft_config=LoraConfig(task_type="CAUSAL_LM") if args.use_peft else None,
            options=options,
        )
        if name != OURS:
            runs[name].trainer = None
    return runs


def summarize(task: str, runs: dict[str, Run]) -> dict[str, Any]:
    """What the comparison found, as plain numbers."""
    ours, padded = runs[OURS], runs[PADDED]
    counts = ours.trainer.total_counts()
    difference = max(abs(a - b) for a, b in zip(ours.losses, padded.losses, strict=True))
    tolerance = BFLOAT16_TOLERANCE if ours.trainer.args.bf16 else FLOAT32_TOLERANCE
    return {
        "task": task,
        "method": ours.trainer.method,
        "steps": len(ours.losses),
        "first_loss": {PADDED: padded.losses[0], OURS: ours.losses[0]},
        "last_loss": {PADDED: padded.losses[-1], OURS: ours.losses[-1]},
        "seconds": {PADDED: padded.seconds, OURS: ours.seconds},
        "tokens_computed": {PADDED: counts.padded, OURS: counts.computed},
        "peak_memory_gib": {PADDED: padded.memory, OURS: ours.memory},
        "speed_up": padded.seconds / ours.seconds,
        "loss_difference": difference,
        "loss_tolerance": tolerance,
        "equal": difference <= tolerance,
    }


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The comparison as a table."""
    table = Table(
        title=f"{summary['task'].upper()}, {summary['steps']} steps on the same batches", title_justify="left"
    )
    for column in ("", PADDED, OURS, ""):
        table.add_column(column, justify="left" if not column else "right")

    def saved(name: str) -> str:
        values = summary[name]
        return f"{1 - values[OURS] / values[PADDED]:.0%} less"

    for title, name, form, remark in (
        ("first loss", "first_loss", "{:.5f}", ""),
        ("last loss", "last_loss", "{:.5f}", f"differ by {summary['loss_difference']:.0e}"),
        ("time", "seconds", "{:.1f} s", f"{summary['speed_up']:.1f}x faster"),
        ("tokens computed", "tokens_computed", "{:,}", saved("tokens_computed")),
        ("peak memory", "peak_memory_gib", "{:.2f} GiB", saved("peak_memory_gib")),
    ):
        table.add_row(title, form.format(summary[name][PADDED]), form.format(summary[name][OURS]), remark)
    console.print(table)
    console.print(f"How: {summary['method']}.")


def sample(trainer: Any, data: Dataset, max_new_tokens: int = 48) -> tuple[str, str]:
    """The last message before an answer in the data, and what the trained model answers."""
    tokenizer, row = trainer.processing_class, data[0]
    prompt = row.get("prompt") or row.get("messages", [])[:1] or next(texts(data))[:200]
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    output = model.generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    return prompt if isinstance(prompt, str) else prompt[-1]["content"], answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the quick start."""
    parser.add_argument("--model", help="hub name or folder of a model; a small Llama from scratch, if left out")
    parser.add_argument("--dataset_name", help="hub name, folder or file; Python's own documentation, if left out")
    parser.add_argument("--dataset_config", help="configuration of the hub data set")
    parser.add_argument("--dataset_train_split", default="train", help="split to train on (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--sft_steps", type=int, default=150, help="steps of the SFT before DPO (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="examples per batch (default: %(default)s)")
    parser.add_argument("--max_length", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--use_peft", action="store_true", help="train LoRA adapters only")
    parser.add_argument("--seed", type=int, default=42, help="seed of everything (default: %(default)s)")
    parser.add_argument("--output_dir", default="quickstart", help="where to write to (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """
    Run the quick start.

    Args:
        args (`argparse.Namespace`):
            Options, see [`add_arguments`].

    Returns:
        `int`: Exit code: 0 if the losses are equal up to rounding, else 1.
    """
    console, output_dir = Console(stderr=args.json), Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    if args.dataset_name is None:
        data = preference_data(args.seed)
    else:
        data = load_rows(args.dataset_name, args.dataset_config, args.dataset_train_split).shuffle(seed=args.seed)
    task = task_of(data.column_names)
    model = args.model or start_from_scratch(data, args, console)
    runs = compare(model, data, args, console)
    summary = summarize(task, runs)
    (output_dir / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    question, answer = sample(runs[OURS].trainer, data)
    if args.json:
        sys.stdout.write(json.dumps({**summary, "sample": {"question": question, "answer": answer}}, indent=2) + "\n")
    else:
        print_summary(summary, console)
        console.print(f"\nAsked:    {question}\nAnswered: {answer}\n", markup=False)
    figures = {"time": summary["seconds"], "tokens": summary["tokens_computed"], "memory": summary["peak_memory_gib"]}
    try:
        plot_runs({name: runs[name].losses for name in (PADDED, OURS)}, figures, task.upper(), output_dir / "chart.png")
        console.print(f"Chart: {output_dir / 'chart.png'}")
    except ImportError as error:
        console.print(f"No chart: {error}", markup=False)
    if not summary["equal"]:
        console.print(
            f"The losses differ by {summary['loss_difference']:.1e}, which is more than rounding "
            f"({summary['loss_tolerance']:.0e}). Please report it with the output of `trl-paddingfree env`."
        )
    return 0 if summary["equal"] else 1
