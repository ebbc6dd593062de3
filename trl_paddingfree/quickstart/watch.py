"""One training run, with its time and memory."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback

from . import side_by_side
from .side_by_side import Trajectory, has_accelerator

# Often enough to see the largest tensors of a step live
SAMPLE_SECONDS = 0.002


@dataclass
class Run(Trajectory):
    """A training run as it was watched. `memory` is GiB at the peak, above the level before the run."""

    memory: float

    @property
    def seconds(self) -> float:
        """Time to train."""
        return self.log_history[-1]["train_runtime"]


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
def watch_memory() -> Iterator[Callable[[], float]]:
    """Yield a function that says, afterwards, how many GiB more were in use at the peak than at the start."""
    gc.collect()
    if has_accelerator():
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        yield lambda: (torch.accelerator.max_memory_allocated() - before) / 2**30
        return
    watch = MemoryWatch()
    watch.start()
    try:
        yield lambda: (watch.peak - watch.before) / 2**30
    finally:
        watch.done.set()
        watch.join()


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


def train(trainer_class: type, config_class: type, console: Console, description: str, **arguments: Any) -> Run:
    """Train by TRL's trainer or ours, with `arguments` as for [`side_by_side.train`], and watch."""
    with watch_memory() as memory, Progress(console=console) as progress:
        callbacks = [ShowSteps(progress, description)]
        trained = side_by_side.train(trainer_class, config_class, callbacks=callbacks, **arguments)
    return Run(**vars(trained), memory=memory())
