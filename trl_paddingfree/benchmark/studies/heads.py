"""Reward, KTO and GRPO by TRL's trainers and by ours, on real rows: tokens, operations and time of their steps."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback

from ...data.load import load_rows
from ...trainers.registry import TRAINERS
from ..flops import count_flops
from ..main import quiet

# Relative; a wrong layout differs in the first or second digit
TOLERANCE = 1e-3
METHODS: dict[str, dict[str, Any]] = {
    "TRL, padded": {"padding_free": False},
    "ours, padding-free": {"prefix_sharing": False},
    "ours, shared prefixes": {"prefix_sharing": True},
}
ARRANGED = {"ours, shared prefixes, arranged": {"prefix_sharing": True, "arrange_micro_batches": "prefix"}}
NUM_GENERATIONS = 8


@dataclass(frozen=True)
class Setup:
    """
    What all methods of a run have in common.

    Args:
        task (`str`):
            `"reward"`, `"kto"` or `"grpo"`.
        source (`str`):
            The data: a hub name or a file.
        model (`str`):
            Folder of a causal language model with its tokenizer.
        num_layers (`int`):
            Layers of it to train: the first ones.
        batch_size (`int`):
            Pairs or completions per micro-batch.
        max_length (`int`):
            Tokens of a row; of a completion, for GRPO.
        steps (`int`):
            Optimizer steps.
        accumulation (`int`, *optional*, defaults to `1`):
            Micro-batches of a step.
    """

    task: str
    source: str
    model: str
    num_layers: int
    batch_size: int
    max_length: int
    steps: int
    accumulation: int = 1


def measure_heads(setup: Setup) -> dict[str, Any]:
    """Train two epochs by all methods: one for the time, one for the operations."""
    rows, arguments = load_rows(setup.source).shuffle(seed=0), dict[str, Any]()
    with quiet():
        if setup.task == "grpo":
            num_completions = setup.steps * setup.batch_size * setup.accumulation
            rows = prompts_of(rows).select(range(num_completions // NUM_GENERATIONS))
            arguments["completions"] = generate(setup, rows)
        else:
            if setup.task == "kto":
                rows = unpaired(rows)
            rows = rows.select(range(min(len(rows), 8 * setup.batch_size * setup.steps)))  # some are too long
        methods = METHODS | (ARRANGED if setup.task == "grpo" else {})
        measured = {name: run_method(setup, rows, options, **arguments) for name, options in methods.items()}
    padded = measured["TRL, padded"]
    for name, found in measured.items():
        for ours, theirs in zip(found["losses"], padded["losses"], strict=True):
            if abs(ours - theirs) > TOLERANCE * max(1.0, abs(theirs)):
                raise AssertionError(f"{setup.task}, {name}: the losses are {found['losses']}, not {padded['losses']}.")
    return {"setup": vars(setup), "methods": measured}


def run_method(
    setup: Setup, rows: Any, options: dict[str, Any], completions: dict[tuple[int, ...], list[list[int]]] | None = None
) -> dict[str, Any]:
    """Tokens, seconds, core seconds, operations and losses of one method."""
    trainer = make_trainer(setup, rows, options, completions)
    step, micro_batches = trainer.training_step, setup.steps * setup.accumulation
    timed: list[tuple[float, float]] = []
    found: dict[str, Any] = {"flops": 0}

    def measured(*args: Any, **kwargs: Any) -> Any:
        if len(timed) == micro_batches:  # the second epoch, on the same rows: counting takes time
            losses: list[Any] = []
            found["flops"] += count_flops(lambda: losses.append(step(*args, **kwargs)))
            return losses[0]
        started, core = time.perf_counter(), time.process_time()
        loss = step(*args, **kwargs)
        timed.append((time.perf_counter() - started, time.process_time() - core))
        counts = trainer.counts.total
        found.update(computed_tokens=counts.computed, padded_slots=counts.padded)
        return loss

    trainer.training_step = measured
    trainer.train()
    seconds, core_seconds = (sum(values) for values in zip(*timed, strict=True))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**found, "seconds": seconds, "core_seconds": core_seconds, "losses": losses}


def make_trainer(setup: Setup, rows: Any, options: dict[str, Any], completions: Any) -> Any:
    """The trainer of one method; one that generates is handed what was generated before."""
    ours = TRAINERS[setup.task]
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trl_paddingfree_benchmark_"),
        "per_device_train_batch_size": setup.batch_size,
        "gradient_accumulation_steps": setup.accumulation,
        "max_steps": 2 * setup.steps,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    task_type = "SEQ_CLS" if setup.task == "reward" else "CAUSAL_LM"
    arguments: dict[str, Any] = {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type=task_type)}
    if setup.task == "grpo":
        settings |= {"num_generations": NUM_GENERATIONS, "max_completion_length": setup.max_length}
        arguments["reward_funcs"] = digits
    else:
        settings["max_length"] = setup.max_length
    trainer = ours(
        model=load(setup, AutoModelForSequenceClassification if setup.task == "reward" else AutoModelForCausalLM),
        args=ours.config_class(**settings, **options),
        train_dataset=rows,
        processing_class=tokenizer,
        **arguments,
    )
    trainer.remove_callback(PrinterCallback)
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
    """The first layers of a model, in float32."""
    options = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    torch.manual_seed(0)
    return kind.from_pretrained(setup.model, dtype=torch.float32, num_hidden_layers=setup.num_layers, **options)


def generate(setup: Setup, rows: Any) -> dict[tuple[int, ...], list[list[int]]]:
    """Completions of every prompt by the whole model, by the prompt's tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(setup.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32).eval()
    options = {"add_generation_prompt": True, "return_dict": True}
    prompts = [tokenizer.apply_chat_template(row["prompt"], **options)["input_ids"] for row in rows]
    torch.manual_seed(0)
    output = model.generate(
        **tokenizer.pad({"input_ids": prompts}, return_tensors="pt"),
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


def heads_report(measured: Sequence[dict[str, Any]], machine: str) -> str:
    """The figures as a Markdown table."""
    lines = [
        "# Reward, KTO and GRPO",
        "",
        f"Real rows on {machine}, float32, LoRA on the first layers of a small model. Each "
        "method trains by its trainer's own `train()` on the same batches, and all losses agree within "
        f"{TOLERANCE:.0e}. Times are those of the steps without the optimizer; core time is less sensitive to other "
        "load. Floating-point operations are counted, not estimated. Of GRPO only the update is measured: completions "
        f"are generated once, {NUM_GENERATIONS} for each prompt, by the whole model with transformers, and replayed "
        "for every method. vLLM is not installed here.",
        "",
        "| task, rows | method | tokens, of padded slots | FLOPs, of padded | speed-up | in core time |",
        "|-|-|-:|-:|-:|-:|",
    ]
    for one in measured:
        setup, padded = one["setup"], one["methods"]["TRL, padded"]
        name = setup["source"].rpartition("/")[2].partition(".")[0]
        size = f"batch {setup['batch_size']}" + (f" x {setup['accumulation']}" if setup["accumulation"] > 1 else "")
        for method, found in one["methods"].items():
            speed, core_speed = (padded[key] / found[key] for key in ("seconds", "core_seconds"))
            lines.append(
                f"| {setup['task']}, {name}, {size}, {setup['max_length']} tokens, {setup['num_layers']} layers "
                f"| {method} | {found['computed_tokens'] / padded['padded_slots']:.0%} "
                f"| {found['flops'] / padded['flops']:.0%} | {speed:.2f}x | {core_speed:.2f}x |"
            )
    return "\n".join(lines)
