#!/usr/bin/env python
"""Draw options, models and data at random, train each draw with padded TRL and with this package, and compare them.

With `--looks`, each draw is trained by this package twice, without and with `check_steps=1`, and compared bit for bit.

Each draw adds one line of JSON to a file. If you run the script again, it goes on where it stopped. In the end,
it prints a table of all lines, for docs/accuracy.md.
"""

import argparse
import json
import logging
import os
import platform
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

TASKS = {
    "dpo": "DPO",
    "sft": "SFT",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "distillation": "Distillation",
}
VERDICTS = ("same", "different", "failed", "refused", "TRL refuses")
VERDICTS_OF_LOOKS = ("same", "different", "alarm", "failed", "refused")


def read(output: Path) -> list[dict]:
    """The draws that are done."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run(draws: int, output: Path, looks: bool = False) -> None:
    """Run the draws that `output` does not have yet."""
    import datasets
    import torch

    from tests.helpers.random_runs import outcome, outcome_of_looks

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    done = {result["seed"] for result in read(output)}
    for seed in sorted({*range(draws)} - done):
        with open(os.devnull, "w") as nothing:  # what trainers print of each step
            sys.stdout = nothing
            try:
                result = outcome_of_looks(seed) if looks else outcome(seed)
            finally:
                sys.stdout = sys.__stdout__
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{seed}: {result['verdict']} {result.get('reason', result.get('differences', ''))}", flush=True)


def report(output: Path, looks: bool = False) -> str:
    """A table of verdicts, and the versions."""
    results = sorted(read(output), key=lambda result: result["seed"])
    verdicts = VERDICTS_OF_LOOKS if looks else VERDICTS
    counts = {task: Counter(r["verdict"] for r in results if r["task"] == task) for task in TASKS}
    lines = [f"| verdict | {' | '.join(TASKS.values())} |", "|-|" + "-|" * len(TASKS)]
    lines += [f"| {verdict} | {' | '.join(str(counts[task][verdict]) for task in TASKS)} |" for verdict in verdicts]
    packages = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch", "accelerate", "peft"))
    seeds = f"{results[0]['seed']} to {results[-1]['seed']}"
    lines += ["", f"{len(results)} draws (seeds {seeds}), Python {platform.python_version()}, {packages}."]
    if looks:
        number, rows = (sum(result.get(name, 0) for result in results) for name in ("looks", "rows"))
        lines[-1] += f" {number:,} looks at {rows:,} rows."
    for result in results:
        if result["verdict"] in ("different", "alarm", "failed"):
            lines.append(f"- {result['seed']}: {result['verdict']}: {result.get('differences', result.get('reason'))}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500, help="number of draws (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("random_comparison.jsonl"))
    parser.add_argument("--looks", action="store_true", help="compare runs with and without looks at their batches")
    arguments = parser.parse_args()
    run(arguments.draws, arguments.output, arguments.looks)
    print(report(arguments.output, arguments.looks))
