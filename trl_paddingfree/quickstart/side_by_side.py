"""Makes TRL's trainer and ours from the same arguments, watches them train, and compares what both log."""

import ctypes
import gc
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..memory.device import has_accelerator
from ..trainers.registry import TRAINERS

# Parts of the names of figures that only one side logs, or that are times
INCOMPARABLE = ("flat/", "runtime", "per_second", "total_flos", "step_time")
ON_CPU = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
_SILENT = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
# Between two readings of memory: the largest tensors of a step live for longer
SAMPLE_SECONDS = 0.002
# Classes, TRL's or ours
AnyTrainer: TypeAlias = Callable[..., Trainer]
AnyConfig: TypeAlias = Callable[..., TrainingArguments]
Options: TypeAlias = Mapping[str, object]
Figure: TypeAlias = float | torch.Tensor | None


@dataclass
class Trajectory:
    """What one training run logged and took."""

    log_history: list[dict[str, float]]
    trainer: Any
    core_seconds: float = 0.0  # CPU time of this process, summed over cores
    memory: float = 0.0  # GiB at the peak, above the level before the run, if it was watched

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step."""
        return [entry["loss"] for entry in self.log_history if "loss" in entry]

    @property
    def seconds(self) -> float:
        """Time to train."""
        return self.log_history[-1]["train_runtime"]


def classes_of(task: str, ours: bool) -> tuple[AnyTrainer, AnyConfig]:
    """The trainer of a task and its configuration: this package's, or TRL's."""
    trainer = TRAINERS[task]
    return (trainer, trainer.config_class) if ours else (trainer.trl_trainer, trainer.trl_config)


def make_trainer(trainer_class: AnyTrainer, config_class: AnyConfig, options: Options, **arguments: object) -> Trainer:
    """A trainer, TRL's or ours, with `options` of its configuration, that logs every step, prints and saves nothing."""
    defaults = {**_SILENT, **({} if has_accelerator() else ON_CPU), **options}
    defaults.setdefault("output_dir", tempfile.mkdtemp(prefix="trl_paddingfree_"))
    trainer = trainer_class(args=config_class(**defaults), **arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


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
    with suppress(AttributeError):  # glibc keeps freed memory, which the run would reuse and seem to need less
        ctypes.CDLL(None).malloc_trim(0)
    watch = MemoryWatch()
    watch.start()
    try:
        yield lambda: (watch.peak - watch.before) / 2**30
    finally:
        watch.done.set()
        watch.join()


class ShowSteps(TrainerCallback):
    """Shows the optimizer's steps, and their losses, in a progress bar."""

    def __init__(self, progress: Progress, description: str):
        self.progress, self.description = progress, description

    def on_train_begin(self, args, state, control, **kwargs):
        self.task = self.progress.add_task(self.description, total=state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            description = f"{self.description}, loss {logs['loss']:.4f}"
            self.progress.update(self.task, completed=state.global_step, description=description)


def train_watched(
    task: str, ours: bool, console: Console, title: str, options: Options, **arguments: object
) -> Trajectory:
    """Train on a task, by this package or by TRL, with a progress bar. CPU time and memory are measured."""
    with watch_memory() as memory, Progress(console=console) as progress:
        trainer_class, config_class = classes_of(task, ours)
        callbacks = [ShowSteps(progress, title)]
        trainer = make_trainer(trainer_class, config_class, options, callbacks=callbacks, **arguments)
        started = time.process_time()
        trainer.train()
        core_seconds = time.process_time() - started
    return Trajectory(trainer.state.log_history, trainer, core_seconds, memory())


def difference(expected: Figure, actual: Figure, floor: float = 1.0) -> float:
    """
    The largest difference of two figures or tensors, relative to the largest expected value, and at least to `floor`: a
    figure near zero is often the difference of larger ones, whose rounding it has.

    `None`, which TRL logs for a mean over nothing, equals NaN. If only one of both is a number, the result is infinite.

    >>> difference(-4.0, -5.0), difference(0.5, 0.75)
    (0.25, 0.25)
    >>> difference(None, 0.5)
    inf
    """
    a, b = (torch.as_tensor(math.nan if x is None else x, dtype=torch.float64) for x in (expected, actual))
    scale = torch.where(a.isfinite(), a.abs(), 0.0).amax().clamp(min=floor)
    off = ((a - b).abs() / scale).nan_to_num(math.inf, math.inf)
    return float(off.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).amax())


def differences(
    padded: Sequence[Mapping[str, Figure]], ours: Sequence[Mapping[str, Figure]], floor: float = 1.0
) -> dict[str, float]:
    """The largest [`difference`] over all logs, of every figure that padded TRL logs; infinite where ours lacks one."""
    found: dict[str, float] = {}
    for expected, actual in zip_longest(padded, ours, fillvalue=dict[str, Figure]()):
        for name in (name for name in expected if not any(part in name for part in INCOMPARABLE)):
            off = difference(expected[name], actual[name], floor) if name in actual else math.inf
            found[name] = max(found.get(name, 0.0), off)
    return found
