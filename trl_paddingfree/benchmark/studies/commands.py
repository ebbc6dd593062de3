"""The commands that measure single parts and write NAME.json and NAME.md into a folder."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..environment import environment, machine_name, provenance
from ..rows import task_of
from .arranging import arranging_report, measure_imbalance, measure_meetings
from .collators import collators_report, time_collators
from .heads import Setup, heads_report, measure_heads
from .packing import measure_packing, packing_report

COMMAND = "python scripts/benchmark.py"
# Small enough for minutes on two cores
HEADS: dict[str, dict[str, int]] = {
    "reward": {"num_layers": 2, "batch_size": 8, "max_length": 512, "steps": 1},
    "kto": {"num_layers": 4, "batch_size": 8, "max_length": 512, "steps": 1},
    "grpo": {"num_layers": 4, "batch_size": 8, "max_length": 128, "steps": 1, "accumulation": 4},
}


def arranging(sources: Sequence[str], folder: Path) -> None:
    """Write what arranging micro-batches changes on some lengths."""
    imbalances = [measure_imbalance(source, processes) for source in sources for processes in (2, 8)]
    pairs = [source for source in sources if task_of(source) == "dpo"]
    meetings = [measure_meetings(source, step_size) for source in pairs for step_size in (32, 128)]
    measured = {"imbalances": imbalances, "meetings": meetings}
    write("arranging", ["--arranging", *sources], measured, arranging_report(imbalances, meetings), folder)


def packing(sources: Sequence[str], folder: Path) -> None:
    """Write what packing changes on some lengths."""
    measured = [measure_packing(source) for source in sources]
    write("packing", ["--packing", *sources], {"measured": measured}, packing_report(measured), folder)


def collators(folder: Path) -> None:
    """Write how long collators take on this machine."""
    found, measured = environment("cpu"), time_collators()
    report = collators_report(measured, machine_name(found))
    write("collators", ["--collators", str(folder)], {"environment": found, "measured": measured}, report, folder)


def heads(model: str, sources: Sequence[str], folder: Path) -> None:
    """Write what Reward, KTO and GRPO compute: a source is TASK=DATA. Written after each: what is measured is safe."""
    found, measured = environment("cpu"), []
    named = [source.partition("=") for source in sources]
    arguments = ["--heads", *(f"{task}={Path(data).name}" for task, _, data in named), "--model", Path(model).name]
    for task, _, data in named:
        one = measure_heads(Setup(task, data, model, **HEADS[task]))
        # Where the files lie says nothing
        names = {"model": Path(model).name, "source": Path(data).name}
        measured.append({**one, "setup": {**one["setup"], **names}})
        report = heads_report(measured, machine_name(found))
        name = "-".join(dict.fromkeys(("heads", *(task for task, _, _ in named))))
        write(name, arguments, {"environment": found, "measured": measured}, report, folder)


def vision(folder: Path) -> None:
    """Write how a small model learns to read pictures, with padding and without."""
    from .vision import measure_vision, vision_report  # the other studies run without Pillow

    found, measured = environment("cpu"), measure_vision()
    report = vision_report(measured, machine_name(found))
    write("vision", ["--vision", str(folder)], {"environment": found, "measured": measured}, report, folder)


def write(name: str, arguments: list[str], measured: dict[str, Any], report: str, folder: Path) -> None:
    """Write NAME.json, and NAME.md with the command that measured it."""
    command = f"{COMMAND} {shlex.join(arguments)}"
    result = {"command": command, **provenance(), **measured}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{report}\n\n```\n{command}\n```\n")
