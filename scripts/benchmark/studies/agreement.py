"""The commands that train, TRL's and ours, with the same flags: whatever they log at every step, side by side."""

import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed

from trl_paddingfree.cli.load import load_rows
from trl_paddingfree.cli.train import main as train_main

from ..differences import differences
from ..environment import machine_name
from .heads import digits, prompts_of, unpaired

# Of values above 1 relative, else absolute. float32: a wrong layout differs in the first or second digit
TOLERANCE = 1e-3
# Few steps need few rows, and preparing them takes time
MOST_ROWS = 200
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


def measure(task: str, source: str, model: str, **flags: str) -> dict[str, Any]:
    """
    Train by TRL's command and by ours: both logs, and the largest difference of each figure. Flags replace those above.

    Raises:
        `AssertionError`: If a figure differs by more than the tolerance, or is missing.
    """
    flags = {**FLAGS, **TASK_FLAGS[task], **flags}
    with tempfile.TemporaryDirectory(prefix="trl_paddingfree_agreement_") as folder:
        rows = load_rows(source)
        rows = rows.select(range(min(len(rows), MOST_ROWS)))
        rows = PREPARED.get(task, lambda given: given)(rows)
        rows.to_json(Path(folder, "data", "train.jsonl"))
        named = {"model_name_or_path": model, "dataset_name": str(Path(folder, "data"))}  # TRL's command takes folders
        padded = _logged(_trls_command, task, Path(folder, "padded"), {**named, **flags})
        ours = _logged(train_main, task, Path(folder, "ours"), {**named, **flags})
    found = differences(padded, ours)
    if off := {name: value for name, value in found.items() if not value <= TOLERANCE}:
        raise AssertionError(f"{task}: not within {TOLERANCE} of padded TRL: {off}.")
    logs = {"padded": padded, "ours": ours, "differences": found}
    return {"task": task, "source": Path(source).name, "flags": flags, **logs}


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


def report(result: dict[str, Any]) -> str:
    """The largest differences as a Markdown table."""
    lines = [
        "# The commands against TRL's",
        "",
        "`trl TASK` and `trl-paddingfree TASK` ran with the same flags and seed, on real rows, with LoRA on a small "
        f"model, in float32 on {machine_name(result['environment'])}. The table compares all figures that TRL logs at "
        "every step. Differences of values above 1 are relative, and the command fails if one exceeds "
        f"{TOLERANCE:.0e}.",
        "",
        "| command, rows | steps | figures | loss | grad_norm | largest difference | in |",
        "|-|-:|-:|-:|-:|-:|-|",
    ]
    for one in result["measured"]:
        off = one["differences"]
        worst = max(off, key=lambda name: off[name])
        lines.append(
            f"| {one['task']}, {one['source'].rpartition('/')[2].partition('.')[0]} | {len(one['ours'])} | {len(off)} "
            f"| {off['loss']:.1e} | {off['grad_norm']:.1e} | {off[worst]:.1e} | `{worst}` |"
        )
    return "\n".join(lines)
