"""The metrics of a micro-batch that runs in parts: those of the whole, over all parts of all processes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..flat.counts import of_all_processes
from ..model.restored import attributes_set

if TYPE_CHECKING:
    from .base import FlatTrainer

# Methods by which losses and metrics exchange figures between processes
_COLLECTIVE = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")


class PartMetrics:
    """TRL's metrics of a micro-batch that runs in parts: sums over those of this process, gathered once at the end."""

    def __init__(self, trainer: "FlatTrainer"):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.metrics, self.tokens_before = trainer._metrics["train"], trainer._total_train_tokens
        # Of each metric times what it is a mean over, and of that
        self.sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.extremes: dict[str, list[float]] = {name: [] for name in trainer.extremes}
        self.seen: set[str] = set()

    @contextmanager
    def of(self, sizes: dict[str, int]) -> Iterator[None]:
        """Within this context, what is logged is that of one part on this process, a mean over so many."""
        logged = {name: len(values) for name, values in self.metrics.items()}
        # Processes have different numbers of parts
        alone = dict.fromkeys(_COLLECTIVE, lambda tensor, *args, **kwargs: tensor)
        with attributes_set((self.accelerator, name, function) for name, function in alone.items()):
            yield
        for name in sizes.keys() - {"loss"}:
            self.sums[name] += 0  # parts of other processes may log what none here does, and all gather the same
        for name in (name for name, values in self.metrics.items() if len(values) > logged.get(name, 0)):
            value, size = self.metrics[name].pop(), sizes.get(name, sizes["loss"])
            if name in self.extremes:
                self.extremes[name].append(value)
            elif name not in self.trainer.differences:
                self.sums[name] += (value * size if size else 0.0, size)  # a mean over nothing may be `nan`
                self.seen.add(name)

    def log(self) -> None:
        """Log the metrics of the whole micro-batch, over all parts of all processes."""
        names, whole = sorted(self.sums), {}
        values = [x for name in names for x in self.sums[name]]
        values.append(self.trainer._total_train_tokens - self.tokens_before)
        *totals, tokens = of_all_processes(values, self.accelerator).sum(0).tolist()
        for name, total, size in zip(names, totals[::2], totals[1::2], strict=True):
            if size or name in self.seen:
                self.metrics[name].append(total / max(size, 1))
                whole[name] = self.metrics[name][-1]
        for name, extreme in self.trainer.extremes.items():
            found = of_all_processes([extreme(self.extremes[name])], self.accelerator)
            self.metrics[name].append(extreme(found[:, 0].tolist()))
        for name, (one, other) in self.trainer.differences.items():
            if one in whole and other in whole:
                self.metrics[name].append(whole[one] - whole[other])
        self.trainer._total_train_tokens = self.tokens_before + int(tokens)
        self.metrics["num_tokens"] = [self.trainer._total_train_tokens]
