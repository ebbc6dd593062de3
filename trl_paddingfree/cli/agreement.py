"""The commands that train, TRL's and ours, with the same flags: whatever they log at every step, side by side."""

import importlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed

from ..benchmark.environment import environment, machine_name
from ..benchmark.main import quiet
from ..benchmark.studies.commands import write
from ..benchmark.studies.heads import digits, prompts_of, unpaired
from ..data.load import load_rows
from .train import main as train_main

# Of values above 1 relative, else absolute. float32: a wrong layout differs in the first or second digit
TOLERANCE = 1e-3
# Few steps need few rows, and preparing them takes time
MOST_ROWS = 200
# Figures that only one side has, or that are times
_INCOMPARABLE = ("flat/", "runtime", "per_second", "step_time")
FLAGS: dict[str, str] = {
    "max_steps": "4",
    "per_device_train_batch_size": "4",
    "learning_rate": "1e-4",
    "dtype": "float32",
    "lora_target_modules": "all-linear",
    "lora_dropout": "0",  # it draws for other tokens in padded rows, where it is not disabled
}
_COLLATED = {"max_length": "128"}
_GENERATING = {
    "reward_funcs": f"{digits.__module__}.{digits.__name__}",
    "num_generations": "4",
    "max_completion_length": "32",
    "num_iterations": "2",
    "beta": "0.04",
}
TASK_FLAGS: dict[str, dict[str, str]] = {
    "dpo": _COLLATED,
    "sft": _COLLATED,
    # Without it, a common shift of all rewards has no gradient: Adam would make steps of its rounding
    "reward": {**_COLLATED, "lora_task_type": "SEQ_CLS", "center_rewards_coefficient": "0.01"},
    "kto": _COLLATED,
    "grpo": _GENERATING,
    "rloo": _GENERATING,
}
PREPARED: dict[str, Callable[[Dataset], Dataset]] = {"grpo": prompts_of, "rloo": prompts_of, "kto": unpaired}
_SHORT = {
    "use_cpu": "true",
    "bf16": "false",
    "report_to": "none",
    "logging_steps": "1",
    "save_strategy": "steps",  # the last checkpoint has the log
    "dataloader_pin_memory": "false",
    "disable_tqdm": "true",
}


def agreement(model: str, sources: Sequence[str], folder: Path) -> None:
    """
    Write how far the commands that train are from TRL's. Written after each source: what is measured is safe.

    Args:
        model (`str`):
            Folder of a causal language model with its tokenizer.
        sources (`Sequence[str]`):
            TASK=DATA each.
        folder (`Path`):
            Where to write agreement.json and agreement.md.
    """
    found, measured = environment("cpu"), []
    named = [source.partition("=") for source in sources]
    arguments = [
        *("--agreement", *(f"{task}={Path(data).name}" for task, _, data in named)),
        *("--model", Path(model).name),
    ]
    for task, _, data in named:
        measured.append({**measure_agreement(task, data, model), "source": Path(data).name})
        report = agreement_report(measured, machine_name(found))
        write("agreement", arguments, {"environment": found, "measured": measured}, report, folder)


def measure_agreement(task: str, source: str, model: str, **flags: str) -> dict[str, Any]:
    """
    Train by TRL's command and by ours.

    Args:
        task (`str`):
            Name of the task.
        source (`str`):
            Its data: a hub name or a file.
        model (`str`):
            Folder of a causal language model with its tokenizer.
        **flags (`str`):
            Flags of both commands, in place of those above.

    Returns:
        `dict[str, Any]`: `"task"`, `"source"`, `"flags"`, the `"padded"` and `"ours"` logs, and `"differences"`, the
        largest of each figure.

    Raises:
        `AssertionError`: If a figure differs by more than the tolerance, or is missing.
    """
    flags = {**FLAGS, **TASK_FLAGS[task], **flags}
    with tempfile.TemporaryDirectory(prefix="trl_paddingfree_agreement_") as folder, quiet():
        rows = load_rows(source)
        rows = rows.select(range(min(len(rows), MOST_ROWS)))
        rows = PREPARED.get(task, lambda given: given)(rows)
        rows.to_json(Path(folder, "data", "train.jsonl"))
        named = {"model_name_or_path": model, "dataset_name": str(Path(folder, "data"))}  # TRL's command takes folders
        padded = _logged(_trls_command, task, Path(folder, "padded"), {**named, **flags})
        ours = _logged(train_main, task, Path(folder, "ours"), {**named, **flags})
    differences = differences_of(padded, ours)
    if off := {name: value for name, value in differences.items() if not value <= TOLERANCE}:
        raise AssertionError(f"{task}: not within {TOLERANCE} of padded TRL: {off}.")
    return {"task": task, "source": source, "flags": flags, "padded": padded, "ours": ours, "differences": differences}


def _trls_command(task: str, argv: Sequence[str]) -> None:
    """What `trl TASK` launches."""
    script = importlib.import_module(f"trl.scripts.{task}")
    script.main(*script.make_parser().parse_args_and_config(argv))


def _logged(
    command: Callable[[str, Sequence[str]], None], task: str, output: Path, flags: dict[str, str]
) -> list[dict[str, Any]]:
    """What a command logs at each step."""
    flags = {**_SHORT, "output_dir": str(output), "save_steps": flags["max_steps"], **flags}
    set_seed(0)  # the head of a reward model is drawn before the trainer sets its seed
    command(task, ["--use_peft", *(part for name, value in flags.items() for part in (f"--{name}", value))])
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    return json.loads(state.read_text())["log_history"]


def differences_of(padded: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The largest difference over all steps, for each figure that padded TRL logs; infinite where ours lacks one."""
    found: dict[str, float] = {}
    nothing: dict[str, Any] = {}
    for expected, actual in zip_longest(padded, ours, fillvalue=nothing):
        for name in (name for name in expected if not any(part in name for part in _INCOMPARABLE)):
            found[name] = max(found.get(name, 0.0), _difference(expected[name], actual.get(name)))
    return found


def _difference(expected: float | None, actual: float | None) -> float:
    one, other = (math.nan if value is None else value for value in (expected, actual))  # TRL's mean over nothing
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(1.0, abs(one))
    return math.inf if math.isnan(difference) else difference


def agreement_report(measured: Sequence[dict[str, Any]], machine: str) -> str:
    """The largest differences as a Markdown table."""
    lines = [
        "# The commands against TRL's",
        "",
        "`trl TASK` and `trl-paddingfree TASK` with the same flags and seed, on real rows, with LoRA on a small model, "
        f"in float32 on {machine}. All figures that TRL logs at every step are compared. Differences of values above 1 "
        f"are relative; the command fails if one exceeds {TOLERANCE:.0e}.",
        "",
        "| command, rows | steps | figures | loss | grad_norm | largest difference | in |",
        "|-|-:|-:|-:|-:|-:|-|",
    ]
    for one in measured:
        differences = one["differences"]
        worst = max(differences, key=lambda name: differences[name])
        lines.append(
            f"| {one['task']}, {one['source'].rpartition('/')[2].partition('.')[0]} | {len(one['ours'])} "
            f"| {len(differences)} | {differences['loss']:.1e} | {differences['grad_norm']:.1e} "
            f"| {differences[worst]:.1e} | `{worst}` |"
        )
    return "\n".join(lines)
