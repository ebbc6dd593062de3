"""What packing changes against padding-free batches: how many optimizer steps, what is in each, and what is cut."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from trl import pack_dataset

from ..report import table
from ..rows import read_lengths

STRATEGIES = ("bfd", "bfd_split", "wrapped")


def measure_packing(source: str, max_length: int = 1024, batch_size: int = 8) -> dict[str, Any]:
    """
    One epoch of rows of instruction data, padding-free and packed by TRL.

    Per method: optimizer `"steps"`; `"examples"` and `"tokens"` per step, with their spread; `"cut"`, the share of the
    examples that are not in one row from end to end; `"lost"`, the share of the tokens that are in no row.
    """
    name, drawn = read_lengths(source, "sft")
    lengths = np.array(drawn)[:, 0]
    # Each token is the number of its example
    dataset = Dataset.from_list([{"input_ids": [i] * n} for i, n in enumerate(lengths.tolist())])
    truncated = [{"input_ids": [i] * min(n, max_length)} for i, n in enumerate(lengths.tolist())]
    packed = {strategy: list(pack_dataset(dataset, max_length, strategy)) for strategy in STRATEGIES}
    return {
        "rows": name,
        "max_length": max_length,
        "batch_size": batch_size,
        "methods": {
            method: _describe([row["input_ids"] for row in rows], lengths, batch_size)
            for method, rows in {"padding_free": truncated, **packed}.items()
        },
    }


def _describe(rows: list[list[int]], lengths: np.ndarray, batch_size: int) -> dict[str, float]:
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    steps = [[rows[i] for i in order[first : first + batch_size]] for first in range(0, len(rows), batch_size)]
    whole_steps = steps[: len(rows) // batch_size] or steps
    examples = [sum(len(set(row)) for row in step) for step in whole_steps]
    tokens = [sum(map(len, step)) for step in whole_steps]
    uncut = sum(int(lengths[i] == n) for row in rows for i, n in zip(*np.unique(row, return_counts=True), strict=True))
    return {
        "steps": math.ceil(len(rows) / batch_size),
        "examples": float(np.mean(examples)),
        "examples_std": float(np.std(examples)),
        "tokens": float(np.mean(tokens)),
        "tokens_std": float(np.std(tokens)),
        "cut": 1 - uncut / len(lengths),
        "lost": 1 - sum(map(len, rows)) / float(lengths.sum()),
    }


def measure(sources: Sequence[str]) -> dict[str, Any]:
    """What packing changes on some lengths."""
    return {"measured": [measure_packing(source) for source in sources]}


def report(result: dict[str, Any]) -> str:
    """The measurements as a Markdown table."""
    first = result["measured"][0]
    lines = [
        "# Packing and padding-free batches",
        "",
        f"Each method trains for one epoch, with {first['batch_size']} rows of at most {first['max_length']} tokens "
        "per optimizer step. `padding_free` has the steps of padded batches. The others are values of TRL's "
        "`packing_strategy`: `bfd` drops what exceeds a row, `bfd_split` packs it as further examples, and `wrapped` "
        "cuts examples wherever a row is full. Figures with ± are means over steps, with their standard deviation.",
        "",
    ]
    rows = []
    for one in result["measured"]:
        for i, (method, figures) in enumerate(one["methods"].items()):
            cells = [
                one["rows"] if i == 0 else "",
                f"`{method}`",
                f"{figures['steps']}",
                f"{figures['examples']:.0f} ± {figures['examples_std']:.0f}",
                f"{figures['tokens']:,.0f} ± {figures['tokens_std']:,.0f}",
                f"{figures['cut']:.1%}",
                f"{figures['lost']:.1%}",
            ]
            rows.append(cells)
    figures = "optimizer steps", "examples per step", "tokens per step", "examples cut", "tokens lost"
    return "\n".join([*lines, *table(["rows", "method", *figures], rows, left=2)])
