"""Reward, KTO and GRPO by TRL's trainers and by ours, on real rows: tokens, operations and time of their steps."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_paddingfree.cli.load import load_rows
from trl_paddingfree.cli.quickstart import side_by_side
from trl_paddingfree.cli.quickstart.side_by_side import classes_of

from ..differences import difference
from ..environment import default_device, machine_name
from ..flops import count_flops
from ..measure import now
from ..report import table

# Relative; a wrong layout differs in the first or second digit, bfloat16 in the third
TOLERANCES = {"cpu": 1e-3, "accelerator": 5e-2}
PADDED = "TRL, padded"
METHODS: dict[str, dict[str, Any]] = {
    PADDED: {},
    "ours, padding-free": {"prefix_sharing": False},
    "ours, shared prefixes": {"prefix_sharing": True},
}
ARRANGED = {"ours, shared prefixes, arranged": {"prefix_sharing": True, "arrange_micro_batches": "prefix"}}
NUM_GENERATIONS = 8
# Small enough for minutes on two cores
ON_TWO_CORES: dict[str, dict[str, int]] = {
    "reward": {"num_layers": 2, "batch_size": 8, "max_length": 512, "steps": 1},
    "kto": {"num_layers": 4, "batch_size": 8, "max_length": 512, "steps": 1},
    "grpo": {"num_layers": 4, "batch_size": 8, "max_length": 128, "steps": 1, "accumulation": 4},
}
# The whole model; of GRPO, eight prompts per step
ON_ACCELERATOR: dict[str, dict[str, int]] = {
    **dict.fromkeys(("reward", "kto"), {"batch_size": 8, "max_length": 1024, "steps": 4}),
    "grpo": {"batch_size": 32, "max_length": 256, "steps": 2, "accumulation": 2},
}


@dataclass(frozen=True)
class Setup:
    """What all methods of a run have in common."""

    task: str
    source: str  # a hub name or a file
    model: str  # folder of a causal language model with its tokenizer
    batch_size: int  # pairs or completions per micro-batch
    max_length: int  # tokens of a row; of a completion, for GRPO
    steps: int  # of the optimizer
    num_layers: int | None = None  # to train: the first ones; all, if `None`
    accumulation: int = 1  # micro-batches of a step
    rounds: int = 3  # in which the methods take turns
    device: str = "cpu"  # in float32; or "accelerator", in bfloat16

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def measure(task: str, source: str, model: str, **sizes: int) -> dict[str, Any]:
    """Train by all methods, which counts operations, and then time their steps in turn. Sizes replace those above."""
    device, defaults = ("accelerator", ON_ACCELERATOR) if side_by_side.has_accelerator() else ("cpu", ON_TWO_CORES)
    setup = Setup(task, source, model, **{**defaults[task], **sizes}, device=device)
    rows, arguments = load_rows(source).shuffle(seed=0), dict[str, Any]()
    if task == "grpo":
        num_completions = setup.steps * setup.batch_size * setup.accumulation
        rows = prompts_of(rows).select(range(num_completions // NUM_GENERATIONS))
        arguments["completions"] = generate(setup, rows)
    else:
        if task == "kto":
            rows = unpaired(rows)
        rows = rows.select(range(min(len(rows), 8 * setup.batch_size * setup.steps)))  # some are too long
    methods = METHODS | (ARRANGED if task == "grpo" else {})
    runs = {name: run_method(setup, rows, name, options, **arguments) for name, options in methods.items()}
    measured = {name: found for name, (found, _) in runs.items()}
    for name, found in measured.items():
        for ours, theirs in zip(found["losses"], measured[PADDED]["losses"], strict=True):
            if not difference(theirs, ours) <= TOLERANCES[device]:
                losses = measured[PADDED]["losses"]
                raise AssertionError(f"{task}, {name}: the losses are {found['losses']}, not {losses}.")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(setup.rounds):
        for name, (_, steps) in runs.items():
            times[name].append(timed(steps, device))
    for name, taken in times.items():
        measured[name]["seconds"], measured[name]["core_seconds"] = map(statistics.median, zip(*taken, strict=True))
    slots = measured["ours, padding-free"]["padded_slots"]
    measured[PADDED] |= {"computed_tokens": slots, "padded_slots": slots}
    # Names only: paths are those of this machine
    named = {"source": Path(source).name, "model": Path(model).name}
    return {"setup": {**asdict(setup), **named}, "methods": measured}


def run_method(
    setup: Setup, rows: Any, name: str, options: dict[str, Any], completions: dict[tuple[int, ...], Any] | None = None
) -> tuple[dict[str, Any], list[Callable[[], Any]]]:
    """Train two epochs by one method. Returns operations, losses and our tokens, and the steps of the second epoch."""
    trainer = make_trainer(setup, rows, name, options, completions)
    step, micro_batches = trainer.training_step, setup.steps * setup.accumulation
    counted: list[int] = []
    steps: list[Callable[[], Any]] = []
    found: dict[str, Any] = {}

    def measured(_: Any, model: Any, inputs: Any, *args: Any) -> Any:
        if len(counted) == micro_batches:  # the second epoch, of the same rows
            steps.append(lambda: step(model, copy.copy(inputs), *args))  # a step empties the inputs that it is given
            return steps[-1]()
        losses: list[Any] = []
        counted.append(count_flops(lambda: losses.append(step(model, inputs, *args))))
        if name != PADDED:
            counts = trainer.runtime.counts.total
            found.update(computed_tokens=counts.computed, padded_slots=counts.padded)
        return losses[0]

    # A class that names its TRL trainer answers for its steps: beside those of other classes, nothing is arranged
    named = {"trl_trainer": trainer.trl_trainer} if name != PADDED else {}
    trainer.__class__ = type(type(trainer).__name__, (type(trainer),), {**named, "training_step": measured})
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**found, "flops": sum(counted), "losses": losses}, steps


def timed(steps: Sequence[Callable[[], Any]], device: str) -> tuple[float, float]:
    """Seconds of some steps, and core seconds."""
    started, core = now(device), time.process_time()
    for step in steps:
        step()
    return now(device) - started, time.process_time() - core


def make_trainer(setup: Setup, rows: Any, name: str, options: dict[str, Any], completions: Any) -> Any:
    """The trainer of one method; one that generates is handed what was generated before."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": setup.batch_size,
        "gradient_accumulation_steps": setup.accumulation,
        "max_steps": 2 * setup.steps,
        "train_sampling_strategy": "sequential",
    }
    task_type = "SEQ_CLS" if setup.task == "reward" else "CAUSAL_LM"
    arguments: dict[str, Any] = {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type=task_type)}
    if setup.task == "grpo":
        settings |= {"num_generations": NUM_GENERATIONS, "max_completion_length": setup.max_length}
        arguments["reward_funcs"] = digits
    else:
        settings["max_length"] = setup.max_length
    trainer: Any = side_by_side.make_trainer(
        *classes_of(setup.task, ours=name != PADDED),
        {**settings, **options},
        model=load(setup, AutoModelForSequenceClassification if setup.task == "reward" else AutoModelForCausalLM),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(setup.model),
        **arguments,
    )
    if completions is None:
        trainer.train_dataset = trainer.train_dataset.select(range(setup.batch_size * setup.steps))
    else:
        waiting = {prompt: cycle(generated) for prompt, generated in completions.items()}
        trainer._generate_single_turn = lambda prompts, *args, **kwargs: (
            [next(waiting[tuple(prompt)]) for prompt in prompts],
            None,
        )
    return trainer


def prompts_of(rows: Dataset) -> Dataset:
    """The prompts of some rows: of conversations, all before the last message."""
    if "prompt" in rows.column_names:
        return rows.select_columns("prompt")
    return rows.map(lambda row: {"prompt": row["messages"][:-1]}, remove_columns=rows.column_names)


def unpaired(rows: Dataset) -> Dataset:
    """The chosen and the rejected completions of pairs, in turn: TRL would put all chosen ones first."""

    def one_of_pair(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {"completion": row["rejected" if index % 2 else "chosen"], "label": index % 2 == 0}

    if "label" in rows.column_names:
        return rows
    return rows.map(one_of_pair, with_indices=True, remove_columns=["chosen", "rejected"])


def load(setup: Setup, kind: Any) -> Any:
    """The first layers of a model."""
    options: dict[str, Any] = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    if setup.num_layers is not None:
        options["num_hidden_layers"] = setup.num_layers
    torch.manual_seed(0)
    return kind.from_pretrained(setup.model, dtype=setup.dtype, **options)


def generate(setup: Setup, rows: Any) -> dict[tuple[int, ...], list[list[int]]]:
    """Completions of every prompt by the whole model, by the prompt's tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(setup.model, padding_side="left")
    device: Any = default_device()
    model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=setup.dtype).to(device).eval()
    options = {"add_generation_prompt": True, "return_dict": True}
    prompts = [tokenizer.apply_chat_template(row["prompt"], **options)["input_ids"] for row in rows]
    torch.manual_seed(0)
    output = model.generate(
        **tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device),
        do_sample=True,
        num_return_sequences=NUM_GENERATIONS,
        max_new_tokens=setup.max_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    completions = [row[max(map(len, prompts)) :].tolist() for row in output]
    ends = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in completions]
    completions = [row[:end] for row, end in zip(completions, ends, strict=True)]
    return {
        tuple(prompt): completions[first : first + NUM_GENERATIONS]
        for prompt, first in zip(prompts, range(0, len(completions), NUM_GENERATIONS), strict=True)
    }


def digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart: the digits in them."""
    return [float(sum(character.isdigit() for character in str(completion))) for completion in completions]


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    setup = result["measured"][0]["setup"]
    device, rounds = setup["device"], setup["rounds"]
    trained = "float32, with LoRA on the first layers of a small model" if device == "cpu" else "bfloat16, with LoRA"
    lines = [
        "# Reward, KTO and GRPO",
        "",
        f"Each method trains on the same real rows, in {trained}, on {machine_name(result['environment'])}. It runs "
        f"its trainer's own `train()`, and all losses agree within {TOLERANCES[device]:.0e}. Times are those of the "
        f"steps without the optimizer, medians of {rounds} rounds in which the methods took turns. Core time is less "
        "sensitive to other load. Floating-point operations are counted, not estimated. GRPO is measured in its update "
        f"only: the whole model generates {NUM_GENERATIONS} completions for each prompt once, with transformers, and "
        "they are replayed for every method. vLLM is not installed here.",
        "",
    ]
    rows = []
    for one in result["measured"]:
        setup, padded = one["setup"], one["methods"][PADDED]
        name, layers = setup["source"].rpartition("/")[2].partition(".")[0], setup["num_layers"] or "all"
        size = f"batch {setup['batch_size']}" + (f" x {setup['accumulation']}" if setup["accumulation"] > 1 else "")
        for method, found in one["methods"].items():
            speed, core_speed = (padded[key] / found[key] for key in ("seconds", "core_seconds"))
            shares = found["computed_tokens"] / padded["padded_slots"], found["flops"] / padded["flops"]
            rows.append(
                [
                    f"{setup['task']}, {name}, {size}, {setup['max_length']} tokens, {layers} layers",
                    method,
                    *(f"{share:.0%}" for share in shares),
                    *(f"{ratio:.2f}x" for ratio in (speed, core_speed)),
                ]
            )
    heads = ["task, rows", "method", "tokens, of padded slots", "FLOPs, of padded", "speed-up", "in core time"]
    return "\n".join([*lines, *table(heads, rows, left=2)])
