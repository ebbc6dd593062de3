"""One training run, with its losses, time and memory."""

import gc
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

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
