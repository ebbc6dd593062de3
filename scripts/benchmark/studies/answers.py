"""Several answers per prompt: all of their pairs by TRL and by ours, and one pair of each prompt by TRL.

The prompts have the lengths of a file of pairs, and the answers those of as many neighbouring pairs as make them up.
Words are drawn at random: only lengths, and what is shared, make a difference.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from trl_paddingfree.cli.quickstart import side_by_side
from trl_paddingfree.cli.quickstart.side_by_side import classes_of, watch_memory

from ..differences import difference
from ..environment import default_device, machine_name
from ..report import table
from ..rows import read_lengths
from ..shapes import SHAPES
from ..trainers import make_tokenizer, same_weights
from .heads import TOLERANCES, timed

WORDS = [f"w{i}" for i in range(8000)]
TRL_ALL, TRL_ONE, OURS, OURS_BEST = "TRL, all pairs", "TRL, one pair", "ours, all pairs", "ours, best pairs"


@dataclass(frozen=True)
class Setup:
    """What the methods of a comparison have in common."""

    source: str
    answers: int  # of each prompt
    prompts: int  # of a micro-batch
    micro_batches: int
    methods: tuple[str, ...] = (TRL_ALL, TRL_ONE, OURS)
    rounds: int = 5  # in which the methods take turns
    max_length: int = 1024
    model: str = "smollm2-135m"


# 28 pairs of longer rows, and 120 of any, would take TRL minutes for each micro-batch
ON_TWO_CORES = (
    Setup("", 4, 2, 1, (TRL_ALL, OURS), rounds=3, model="llama-narrow"),
    Setup("", 4, 4, 4, (TRL_ONE, OURS), rounds=3, model="llama-narrow"),
    Setup("", 8, 1, 1, rounds=3, max_length=512, model="llama-narrow"),
    Setup("", 16, 1, 2, (OURS_BEST, OURS), rounds=3, model="llama-narrow"),
)
ON_ACCELERATOR = (
    Setup("", 4, 2, 8),
    Setup("", 8, 1, 8),
    Setup("", 16, 1, 8, (OURS_BEST, OURS)),
)


def make_prompts(setup: Setup) -> list[dict[str, Any]]:
    """Prompts with their answers and scores, in words, and cut to `max_length`."""
    _, lengths = read_lengths(setup.source, "dpo")
    rng, rows = np.random.default_rng(0), []

    def words(number: int) -> str:
        return " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=max(number, 1)))

    each = setup.answers // 2
    for first in range(0, setup.prompts * setup.micro_batches * each, each):
        prompt = min(lengths[first][0], setup.max_length // 2)
        answers = [n for _, *pair in lengths[first : first + each] for n in pair]
        texts = [" " + words(min(n, setup.max_length - prompt) - 1) for n in answers]  # TRL ends each with a token
        rows.append({"prompt": words(prompt), "completions": texts, "scores": [float(-i) for i in range(len(texts))]})
    return rows


def pairs_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """All pairs of a prompt, as TRL reads them: the earlier answer is the better one."""
    texts = row["completions"]
    return [
        {"prompt": row["prompt"], "chosen": texts[i], "rejected": texts[j]}
        for i in range(len(texts))
        for j in range(i + 1, len(texts))
    ]


def measure(sources: Sequence[str]) -> dict[str, Any]:
    """Each comparison on the lengths of each source."""
    setups = ON_ACCELERATOR if side_by_side.has_accelerator() else ON_TWO_CORES
    return {"measured": [measure_one(Setup(**{**asdict(x), "source": one})) for one in sources for x in setups]}


def measure_one(setup: Setup) -> dict[str, Any]:
    """Train by each method, which counts tokens, and then time their steps in turn."""
    device, rows = default_device(), make_prompts(setup)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = SHAPES[setup.model] | {"vocab_size": len(WORDS) + 3}
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    runs = {name: run_method(setup, rows, name, base) for name in setup.methods}
    measured = {name: found for name, (found, _) in runs.items()}
    allowed = TOLERANCES["cpu" if device == "cpu" else "accelerator"]
    if TRL_ALL in measured:
        for theirs, ours in zip(measured[TRL_ALL]["losses"], measured[OURS]["losses"], strict=True):
            if not difference(theirs, ours) <= allowed:
                raise AssertionError(f"The losses are {measured[OURS]['losses']}, not {measured[TRL_ALL]['losses']}.")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(setup.rounds):
        for name, (_, steps) in runs.items():
            times[name].append(timed(steps, device))
    for name, taken in times.items():
        seconds, core_seconds = zip(*taken, strict=True)
        measured[name] |= {"seconds": statistics.median(seconds), "core_seconds": statistics.median(core_seconds)}
        # Of the same round: what else a machine does comes and goes
        measured[name]["times_ours"] = statistics.median(
            mine / ours for (_, mine), (_, ours) in zip(taken, times[OURS], strict=True)
        )
    return {"setup": asdict(setup) | {"source": read_lengths(setup.source, "dpo")[0]}, "methods": measured}


def run_method(
    setup: Setup, rows: list[dict[str, Any]], name: str, base: Any
) -> tuple[dict[str, Any], list[Callable[[], Any]]]:
    """One epoch by a method. Returns its figures, and its steps."""
    is_ours = name in (OURS, OURS_BEST)
    data = rows if is_ours else [pair for row in rows for pair in pairs_of(row)[: 1 if name == TRL_ONE else None]]
    size = setup.prompts * (len(data) // len(rows))
    trainer = side_by_side.make_trainer(
        *classes_of("dpo", is_ours),
        {
            "per_device_train_batch_size": size,
            "num_train_epochs": 1,
            "max_length": setup.max_length,
            "train_sampling_strategy": "sequential",
            **({"answer_pairs": "best"} if name == OURS_BEST else {}),
        },
        model=copy.deepcopy(base),
        ref_model=same_weights(base),
        train_dataset=Dataset.from_list(data),
        processing_class=make_tokenizer(WORDS),
    )
    step, steps, slots, pairs = trainer.training_step, list[Callable[[], Any]](), list[int](), list[int]()

    def noted(_: Any, model: Any, inputs: Any, *args: Any) -> Any:
        slots.append(inputs["input_ids"].numel())
        pairs.append(len(inputs["input_ids"]) // 2)
        kept = copy.copy(inputs)  # a step empties the inputs that it is given
        steps.append(lambda: step(model, copy.copy(kept), *args))
        return steps[-1]()

    # Not on the trainer: a step of one's own would be looked at by budgets
    with mock.patch.object(type(trainer), "training_step", noted), watch_memory() as memory:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found: dict[str, Any] = {"pairs": sum(pairs), "tokens": sum(slots), "peak_gib": memory(), "losses": losses}
    if is_ours:
        counts = trainer.runtime.counts.total
        found |= {"tokens": counts.computed, "distinct": counts.distinct}
    trainer.model.zero_grad()
    return found, steps


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines, rows = [], []
    for one in result["measured"]:
        setup, methods = one["setup"], one["methods"]
        for name, found in methods.items():
            prompts = f"{setup['prompts']} prompt{'s' * (setup['prompts'] > 1)}"
            rows.append(
                [
                    f"{prompts} with {setup['answers']} answers, rows of at most {setup['max_length']} tokens",
                    name,
                    f"{found['pairs'] // setup['micro_batches']}",
                    f"{found['tokens'] // setup['micro_batches']:,}",
                    f"{found['peak_gib']:.2f}",
                    f"{found['core_seconds'] / setup['micro_batches']:.2f}",
                    f"{found['times_ours']:.2f}x",
                ]
            )
    first = result["measured"][0]["setup"]
    distinct = [x["methods"][OURS]["tokens"] / x["methods"][OURS]["distinct"] for x in result["measured"]]
    lines += [
        "# Several answers per prompt",
        "",
        f"DPO on prompts with 4, 8 and 16 answers, by {first['model']} with random weights and {len(WORDS):,} "
        f"words, on {machine_name(result['environment'])}. Lengths are those of {first['source']}, and the reference "
        "is computed in each step. Methods take turns in one process: times are medians of one micro-batch, and their "
        "ratio to ours is the median of those within a round. Tokens "
        f"are padded slots in TRL, and those computed in ours: at most {max(distinct):.4f} times the distinct ones. "
        "Losses of all pairs agree.",
        "",
        *table(["micro-batch", "method", "pairs", "tokens", "peak GiB", "core seconds", "times ours"], rows),
    ]
    if (last := result["measured"][-1]["methods"]).keys() == {OURS_BEST, OURS}:
        share = 1 - last[OURS_BEST]["times_ours"]
        lines += [
            "",
            f"Of 16 answers, all {last[OURS]['pairs'] // result['measured'][-1]['setup']['micro_batches']} pairs and "
            f"the best answer's 15 compute the same tokens: TRL's loss on the others, and the rows that it reads, are "
            f"{share:.0%} of the time.",
        ]
    return "\n".join(lines)
