"""What `arrange_micro_batches` does: processes that wait less for each other, and prefixes that meet."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from trl_paddingfree.arranging.order import StepSampler, by_prefix, by_tokens
from trl_paddingfree.core.data.collate import PreferenceCollator
from trl_paddingfree.core.data.lengths import example_tokens, example_work, truncated

from ..report import table
from ..rows import make_rows, read_lengths, task_of

HIDDEN_SIZE = 4096  # of the model that the quadratic term of attention is weighed for: an 8B Llama
ORDERS = ("drawn", "arranged")
FIGURES = [(key, order) for key in ("time", "memory") for order in ORDERS]


def measure_imbalance(
    source: str, num_processes: int, batch_size: int = 4, accumulation: int = 4, max_length: int = 2048, seed: int = 0
) -> dict[str, Any]:
    """
    Imbalance of one epoch in random order, prefixes shared for preference data.

    For the orders `"drawn"` and `"arranged"`: `"time"`, of a step over that of evenly spread work; and `"memory"`,
    tokens of the largest micro-batch over those of the mean one.
    """
    task = task_of(source)
    name, drawn = read_lengths(source, task)
    if task == "dpo":
        lengths = truncated(np.array(drawn, dtype=np.int64), max_length, "keep_start")
    else:
        lengths = np.minimum(np.array(drawn, dtype=np.int64)[:, :1], max_length)
    work = example_work(lengths, True, HIDDEN_SIZE)
    tokens = example_tokens(lengths, True)
    step_size = batch_size * num_processes * accumulation
    order = one_epoch(len(work), step_size, seed)
    arranged = list(StepSampler(order, step_size, by_tokens(work, batch_size, num_processes)))
    return {
        "rows": name,
        "processes": num_processes,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "max_length": max_length,
        **{
            label: {
                "time": imbalance(work[indices], batch_size, num_processes),
                "memory": largest_over_mean(tokens[indices], batch_size),
            }
            for label, indices in (("drawn", order), ("arranged", arranged))
        },
    }


def one_epoch(num_examples: int, step_size: int, seed: int) -> list[int]:
    """The examples in random order, as many as make whole steps."""
    order = np.random.default_rng(seed).permutation(num_examples)
    return order[: num_examples // step_size * step_size].tolist()


def imbalance(work: Sequence[float] | np.ndarray, batch_size: int, num_processes: int) -> float:
    """
    How much longer processes take because they wait for each other, by the work of the examples in the order of
    training: the sum over rounds of micro-batches of the most costly one, over their mean.
    """
    round_size = batch_size * num_processes
    whole = np.asarray(work[: len(work) // round_size * round_size], dtype=np.float64)
    micro_batches = whole.reshape(-1, num_processes, batch_size).sum(2)
    return float(micro_batches.max(1).sum() / micro_batches.mean(1).sum())


def largest_over_mean(tokens: Sequence[int] | np.ndarray, batch_size: int) -> float:
    """Tokens of the largest micro-batch over those of the mean one."""
    micro_batches = np.asarray(tokens).reshape(-1, batch_size).sum(1)
    return float(micro_batches.max() / micro_batches.mean())


def measure_meetings(
    source: str, step_size: int, pairs_per_prompt: int = 4, batch_size: int = 4, max_length: int = 2048, seed: int = 0
) -> dict[str, Any]:
    """
    Tokens computed in one epoch of preference data with several pairs per prompt, in random order.

    For the orders `"drawn"` and `"arranged"`: over the tokens of flat batches in which nothing is shared.
    """
    rows = make_rows(
        "dpo", source, vocab_size=32000, max_length=max_length, seed=seed, pairs_per_prompt=pairs_per_prompt
    )
    order = one_epoch(len(rows.examples), step_size, seed)
    arrange = by_prefix(Dataset.from_list(rows.examples), "prompt_ids")
    collator = PreferenceCollator(0, padding_free=True)
    computed, real = {}, 0
    for label, indices in (("drawn", order), ("arranged", list(StepSampler(order, step_size, arrange)))):
        batches = [indices[first : first + batch_size] for first in range(0, len(indices), batch_size)]
        counts = [collator([rows.examples[i] for i in batch])["flat_batch"].counts for batch in batches]
        real = sum(count.real for count in counts)
        computed[label] = sum(count.computed for count in counts) / real
    return {"rows": rows.name, "batch_size": batch_size, "step_size": step_size, "max_length": max_length, **computed}


def measure(sources: Sequence[str]) -> dict[str, Any]:
    """What arranging micro-batches changes on some lengths: balance on two and eight processes, and shared prompts."""
    pairs = [source for source in sources if task_of(source) == "dpo"]
    return {
        "imbalances": [measure_imbalance(source, processes) for source in sources for processes in (2, 8)],
        "meetings": [measure_meetings(source, step_size) for source in pairs for step_size in (32, 128)],
    }


def report(result: dict[str, Any]) -> str:
    """The measurements as Markdown tables."""
    imbalances, meetings = result["imbalances"], result["meetings"]
    first, meeting = imbalances[0], meetings[0]
    balance = [
        [one["rows"], f"{one['processes']}", *(f"{one[order][key]:.2f}" for key, order in FIGURES)]
        for one in imbalances
    ]
    shared = [[one["rows"], f"{one['step_size']}", *(f"{one[order]:.3f}" for order in ORDERS)] for one in meetings]
    lines = [
        "# Arranging micro-batches",
        "",
        "## Balance of processes",
        f"Each process has {first['accumulation']} micro-batches of {first['batch_size']} examples per step, with rows "
        f"of at most {first['max_length']} tokens, in random order for one epoch. Pairs share their prefixes, and work "
        f'is that of a model with hidden size {HIDDEN_SIZE}. "Drawn" is `arrange_micro_batches="none"`, and "arranged" '
        'is `"tokens"`.',
        "",
        "- **time**: the time of a step, over the time it would take if all work were spread evenly. Processes wait "
        "for the slowest after every micro-batch.",
        "- **memory**: the tokens of the largest micro-batch of the epoch, over those of the mean one.",
        "",
        *table(["rows", "processes", *(f"{key}, {order}" for key, order in FIGURES)], balance),
        "",
        "## Prefixes that meet",
        f"Each micro-batch has {meeting['batch_size']} pairs with rows of at most {meeting['max_length']} tokens, in "
        'random order for one epoch. "Drawn" is `arrange_micro_batches="none"`, and "arranged" is `"prefix"`. The '
        "table has the tokens computed, over the real tokens: what is below 1 was shared. Examples of a prompt only "
        "meet if they are in the same optimizer step.",
        "",
        *table(["rows", "pairs per step", *ORDERS], shared),
    ]
    return "\n".join(lines)
