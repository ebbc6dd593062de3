"""The tasks that the benchmark measures: their methods, their lengths, and examples made of lengths."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_paddingfree.core.flat.batch import IGNORE_INDEX

from .baseline import TWO_BOUNDARIES

# A length is a tuple of tokens, by the task's columns
Length = tuple[int, ...]
Example = dict[str, Any]
Draw = Callable[[int], list[int]]  # gives so many random tokens


@dataclass(frozen=True)
class Method:
    """One way to train: TRL's, or this package's."""

    name: str  # on the command line and in results
    label: str
    ours: bool
    options: dict[str, Any] = field(default_factory=dict)  # of its configuration
    keeps: bool = False  # whether it keeps activations, at least where they fit, while other methods recompute
    attention: str | None = None  # an attention implementation of its own, by PyTorch's varlen kernel

    @property
    def is_asked_for(self) -> bool:
        """Whether it runs only if `--methods` names it: what answers another question, or compiles for minutes."""
        return self.attention is not None or "torch_compile" in self.options


BASELINE = "trl"
PACKED = {"packing": True, "packing_strategy": "bfd"}
_PADDED = (
    Method(BASELINE, "TRL, padded", False),
    Method("trl-kept", "TRL, padded, nothing recomputed", False, {"gradient_checkpointing": False}, keeps=True),
    # PyTorch may choose the kernel by whether the boundaries of queries and keys are one tensor: ours are two
    Method("trl-two-boundaries", "TRL, padded, boundaries in two tensors", False, attention=TWO_BOUNDARIES),
)
BUDGETED = {"prefix_sharing": True, "memory_budget": "auto"}
_OURS = (
    Method("flat", "ours, padding-free", True, {"prefix_sharing": False}),
    Method("shared", "ours, shared prefixes", True, {"prefix_sharing": True}),
    Method("budget", "ours, shared, with a memory budget", True, BUDGETED, keeps=True),
    Method("compiled", "ours, shared, budget, compiled", True, {**BUDGETED, "torch_compile": True}, keeps=True),
)


@dataclass(frozen=True)
class BenchmarkTask:
    """A task as the benchmark measures it."""

    unit: str  # what a batch holds, in the plural
    methods: tuple[Method, ...]
    columns: tuple[str, ...]  # of a length file, of which a `Length` is made
    of_two: Callable[[int, int], Length]  # the length of an example, from two drawn lengths of rows
    # An example, of `(length, tokens, prompt, max_length)`; `None` if truncation leaves nothing to learn from
    make: Callable[[Length, Draw, list[int], int], Example | None]
    prompt: Callable[[Length], int]  # tokens of a length's prompt
    length: Callable[[Example], Length]
    probe: Callable[[int, int], Example]  # so many unscored and scored tokens in its longest row
    text: dict[str, str]  # a row to set a trainer up with
    truncates: bool  # whether trainers get `max_length`: TRL's padding-free SFT wants none, and truncated rows
    has_reference: bool
    averages_loss: bool  # over scored tokens


def _make_pair(length: Length, tokens: Draw, prompt: list[int], max_length: int) -> Example | None:
    prompt = prompt[:max_length]
    chosen, rejected = (tokens(n)[: max_length - len(prompt)] for n in length[1:])
    if len(prompt) >= max_length:
        return None
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _make_row(length: Length, tokens: Draw, prompt: list[int], max_length: int) -> Example | None:
    row = prompt + tokens(length[1])
    if len(prompt) >= max_length:
        return None
    labels = [IGNORE_INDEX] * len(prompt) + row[len(prompt) :]
    return {"input_ids": row[:max_length], "labels": labels[:max_length]}


def _probe_pair(unscored: int, scored: int) -> Example:
    completion = list(range(100, 100 + scored))
    return {
        "prompt_ids": list(range(8, 8 + unscored)),
        "chosen_ids": completion,
        "rejected_ids": [token + 50 for token in completion],
    }


def _probe_row(unscored: int, scored: int) -> Example:
    prompt, completion = list(range(8, 8 + unscored)), list(range(100, 100 + scored))
    return {"input_ids": prompt + completion, "labels": [IGNORE_INDEX] * unscored + completion}


BENCHMARKED = {
    "dpo": BenchmarkTask(
        unit="pairs",
        methods=(*_PADDED, *_OURS),
        columns=("prompt", "chosen", "rejected"),
        of_two=lambda a, b: (min(a, b) // 2, a - min(a, b) // 2, b - min(a, b) // 2),
        make=_make_pair,
        prompt=lambda length: length[0],
        length=lambda row: tuple(len(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")),
        probe=_probe_pair,
        text={"prompt": "a", "chosen": " b", "rejected": " b b"},
        truncates=True,
        has_reference=True,
        averages_loss=False,
    ),
    "sft": BenchmarkTask(
        unit="rows",
        methods=(
            *_PADDED,
            Method("trl-packing", "TRL, packed (bfd)", False, PACKED),
            Method("trl-padding-free", "TRL, padding-free", False, {"padding_free": True}),
            *_OURS,
        ),
        columns=("total", "assistant"),
        of_two=lambda a, _: (a, a - a // 2),
        make=_make_row,
        prompt=lambda length: length[0] - length[1],
        length=lambda row: (len(row["input_ids"]), sum(label != IGNORE_INDEX for label in row["labels"])),
        probe=_probe_row,
        text={"prompt": "a", "completion": " b"},
        truncates=False,
        has_reference=False,
        averages_loss=True,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What all methods of a run have in common: what describes training."""

    task: str
    model: str
    device: str
    dtype: str
    tuning: str
    batch_size: int
    max_length: int
    precomputed_reference: bool = False
    gradient_checkpointing: bool = True
    learning_rate: float | None = None  # TRL's

    @property
    def benchmarked(self) -> BenchmarkTask:
        """The task as the benchmark measures it."""
        return BENCHMARKED[self.task]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch has it."""
        return getattr(torch, self.dtype)

    @property
    def on_accelerator(self) -> bool:
        """Whether an accelerator computes, whose memory PyTorch knows and whose work is queued."""
        return self.device != "cpu"

    def probe(self, unscored: int, scored: int) -> Example:
        """An example with given numbers of unscored and scored tokens in its longest row."""
        given = {"ref_chosen_logps": -1.0, "ref_rejected_logps": -1.0} if self.precomputed_reference else {}
        return {**self.benchmarked.probe(unscored, scored), **given}
