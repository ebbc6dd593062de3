"""Makes TRL's trainer and ours from the same arguments, and watches them train."""

import ctypes
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PrinterCallback, TrainerCallback

from ...core.device import GIB, has_accelerator
from ...registry import TRAINERS

ON_CPU = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
# Between two readings of memory: the largest tensors of a step live longer than this
SAMPLE_SECONDS = 0.002


Figures = dict[str, Any]  # of one run, or of both, by name


def classes_of(task: str, ours: bool) -> tuple[Any, Any]:
    """The trainer of a task and its configuration: this package's, or TRL's."""
    trainer = TRAINERS[task]
    return (trainer, trainer.config_class) if ours else (trainer.trl_trainer, trainer.trl_config)


def make_trainer(trainer_class: Any, config_class: Any, options: dict[str, Any], **arguments: Any) -> Any:
    """A trainer, TRL's or ours, that prints nothing and, unless `options` differ, logs every step and saves nothing."""
    options = {
        "output_dir": tempfile.mkdtemp(prefix="trl_paddingfree_"),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({} if has_accelerator() else ON_CPU),
        **options,
    }
    if "check_steps" in config_class.__dataclass_fields__:
        options.setdefault("check_steps", 0)  # a look at the first of a few steps would count for more than in a run
    trainer = trainer_class(args=config_class(**options), **arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextmanager
def watch_memory() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the peak of memory in use so far, in GiB above that at the start."""
    gc.collect()
    if has_accelerator():
        torch.accelerator.reset_peak_memory_stats()
        start = torch.accelerator.memory_allocated()
        yield lambda: (torch.accelerator.max_memory_allocated() - start) / GIB
        return
    with suppress(AttributeError):  # glibc keeps freed memory: a run that reused it would seem to need less
        ctypes.CDLL(None).malloc_trim(0)
    process, done = psutil.Process(), threading.Event()
    start = peak = process.memory_info().rss

    def watch():
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: (peak - start) / GIB
    finally:
        done.set()
        watcher.join()


class ShowSteps(TrainerCallback):
    """Shows the optimizer's steps, and their losses, in a progress bar."""

    def __init__(self, progress: Progress, title: str):
        self.progress, self.title = progress, title
        self.task = progress.add_task(title)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.progress.update(
                self.task,
                total=state.max_steps,
                completed=state.global_step,
                description=f"{self.title}, loss {logs['loss']:.4f}",
            )


def train_watched(
    task: str, ours: bool, console: Console, title: str, options: dict[str, Any], **arguments: Any
) -> tuple[Any, Figures]:
    """
    Train on a task, by this package or by TRL, with a progress bar. Returns the trainer, and the figures of the run:
    losses of all steps; and its seconds, CPU seconds summed over cores, and peak memory in GiB above that at the start,
    all of training alone: what comes before, such as the start-up check, is left out.
    """
    with Progress(console=console) as progress:
        trainer = make_trainer(*classes_of(task, ours), options, callbacks=[ShowSteps(progress, title)], **arguments)
        with watch_memory() as memory:
            started = time.process_time()
            trainer.train()
            core_seconds, peak_memory = time.process_time() - started, memory()
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return trainer, {
        "losses": losses,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds": history[-1]["train_runtime"],
        "core_seconds": core_seconds,
        "peak_memory_gib": peak_memory,
    }
