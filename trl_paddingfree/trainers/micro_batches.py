"""The micro-batches of a run: which examples share one, and how one runs in parts with the figures of the whole."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import RandomSampler

from ..batching.arrange import StepSampler, by_prefix, by_tokens, ranks_of
from ..batching.lengths import example_work


def arranged_sampler(
    sampler: Any,
    arrange: Callable[[list[int]], list[int]],
    *,
    step_size: int,
    data_seed: int | None,
    use_seedable_sampler: bool = True,
) -> StepSampler:
    """
    Rearrange the order of a sampler within each optimizer step.

    Args:
        sampler (`Sampler`):
            The sampler that transformers' trainer made.
        arrange (`Callable`):
            Returns the examples of one step in another order.
        step_size (`int`):
            Examples per optimizer step, over all processes and accumulation steps.
        data_seed (`int`, *optional*):
            Seed of a random order.
        use_seedable_sampler (`bool`, *optional*, defaults to `True`):
            Whether accelerate would put a sampler of its own in the place of a random one.
    """
    if isinstance(sampler, RandomSampler) and use_seedable_sampler:
        # What accelerate would put in its place, had it found it
        sampler = SeedableRandomSampler(sampler.data_source, data_seed=data_seed)
    return StepSampler(sampler, step_size, arrange)


def arrangement(
    how: str,
    dataset: Dataset,
    lengths: np.ndarray,
    *,
    prefix_column: str,
    prefix_sharing: bool,
    hidden_size: int,
    batch_size: int,
    num_processes: int,
) -> Callable[[list[int]], list[int]]:
    """
    What `arrange_micro_batches` makes of one optimizer step.

    Args:
        how (`str`):
            `"tokens"` or `"prefix"`.
        dataset ([`~datasets.Dataset`]):
            The prepared training data.
        lengths (`np.ndarray`):
            Lengths of its examples, as for [`~trl_paddingfree.batching.lengths.example_work`].
        prefix_column (`str`):
            Column of token ids that examples start with.
        prefix_sharing (`bool`), hidden_size (`int`):
            As for [`~trl_paddingfree.batching.lengths.example_work`].
        batch_size (`int`), num_processes (`int`):
            As for [`~trl_paddingfree.batching.arrange.by_tokens`].
    """
    if how == "prefix":
        column = dataset.with_format("numpy", columns=[prefix_column])
        return by_prefix(ranks_of([np.asarray(row[prefix_column], dtype=np.int64).tobytes() for row in column]))
    return by_tokens(example_work(lengths, prefix_sharing, hidden_size), batch_size, num_processes)


@dataclass(frozen=True)
class Part:
    """
    A part of a micro-batch.

    Args:
        inputs (`dict[str, Any]`):
            Its batch.
        sizes (`dict[str, int]`):
            What its loss, under the name "loss", and each of its metrics is a mean over: how many. All 0 if the part
            is computed only to keep step with other processes.
        weight (`float`):
            By what its loss is multiplied, so that the losses of all parts add up to that of the micro-batch.
        is_last (`bool`):
            Whether gradients are synchronized after it.
    """

    inputs: dict[str, Any]
    sizes: dict[str, int]
    weight: float
    is_last: bool


def weighted_parts(
    batches: list[dict[str, Any]],
    count: Callable[[dict[str, Any]], dict[str, int]],
    *,
    num_wanted: int,
    is_normalized: bool,
) -> list[Part]:
    """
    The parts of a micro-batch, with their weights.

    Args:
        batches (`list[dict[str, Any]]`):
            Their batches.
        count (`Callable`):
            Gives the sizes of one, see [`Part`].
        num_wanted (`int`):
            The most parts that any process has. Where weights are sharded, processes gather them together: those with
            fewer parts repeat one for nothing.
        is_normalized (`bool`):
            Whether the loss is normalized by the tokens of the whole step, and adds up by itself.
    """
    sizes, idle = [count(batch) for batch in batches], num_wanted - len(batches)
    whole = max(sum(size["loss"] for size in sizes), 1)
    parts = [
        Part(batch, size, 1.0 if is_normalized else size["loss"] / whole, i == num_wanted - 1)
        for i, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    ]
    for i in range(idle):
        nothing = {**batches[-1], "attention_mask": torch.zeros_like(batches[-1]["attention_mask"])}
        parts.append(Part(nothing, dict.fromkeys(sizes[-1], 0), 0.0, i == idle - 1))
    return parts


class PartMetrics:
    """
    TRL's metrics of a micro-batch that runs in parts: sums over the parts of this process, gathered once at the end.

    Args:
        trainer ([`~trl.trainer.base_trainer._BaseTrainer`]):
            The trainer whose metrics of training these are.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.accelerator = trainer, trainer.accelerator
        self.metrics, self.tokens_before = trainer._metrics["train"], trainer._total_train_tokens
        # Of each metric times what it is a mean over, and of that
        self.sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        self.extremes: dict[str, list[float]] = {name: [] for name in trainer.extremes}
        self.seen: set[str] = set()

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Within this context, what is logged is that of one part on this process: parts of others differ in size."""
        logged = {name: len(values) for name, values in self.metrics.items()}
        accelerator: Any = self.accelerator
        accelerator.gather = accelerator.gather_for_metrics = lambda tensor: tensor
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics
        for name in part.sizes.keys() - {"loss"}:
            self.sums[name] += 0  # parts of other processes may log what none here does, and all gather the same
        for name in (name for name, values in self.metrics.items() if len(values) > logged.get(name, 0)):
            value, size = self.metrics[name].pop(), part.sizes.get(name, part.sizes["loss"])
            if name in self.extremes:
                self.extremes[name].append(value)
            elif name not in self.trainer.differences:
                self.sums[name] += (value * size if size else 0.0, size)  # a mean over nothing may be `nan`
                self.seen.add(name)

    def log(self) -> None:
        """Log the metrics of the whole micro-batch, over all parts of all processes."""
        names, whole = sorted(self.sums), {}
        values = [
            *(x for name in names for x in self.sums[name]),
            self.trainer._total_train_tokens - self.tokens_before,
        ]
        gathered = self.accelerator.gather(torch.tensor([values], device=self.accelerator.device))
        *totals, tokens = gathered.sum(0).tolist()
        for name, total, size in zip(names, totals[::2], totals[1::2], strict=True):
            if size or name in self.seen:
                self.metrics[name].append(total / max(size, 1))
                whole[name] = self.metrics[name][-1]
        for name, extreme in self.trainer.extremes.items():
            own = torch.tensor([extreme(self.extremes[name])], device=self.accelerator.device)
            self.metrics[name].append(extreme(self.accelerator.gather(own).tolist()))
        for name, (one, other) in self.trainer.differences.items():
            if one in whole and other in whole:
                self.metrics[name].append(whole[one] - whole[other])
        self.trainer._total_train_tokens = self.tokens_before + int(tokens)
        self.metrics["num_tokens"] = [self.trainer._total_train_tokens]
