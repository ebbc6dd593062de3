"""Compares results with those of an earlier revision: what got slower, and what computes more."""

import json
import subprocess
from pathlib import Path
from typing import Any

from .report import table
from .tables import results

HEADS = ("result", "rows", "method", "in core time, then", "now", "change", "FLOPs / TRL, then", "now")
NOTABLE = 0.03  # changes of core time below this share are noise


def earlier(root: Path, revision: str, path: str) -> dict[str, Any] | None:
    """A result as it was at a revision; `None` if there was none."""
    command = ["git", "-C", str(root), "show", f"{revision}:docs/benchmarks/{path}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(found.stdout) if found.returncode == 0 else None


def page(root: Path, revision: str) -> str:
    """
    A Markdown table of the speed-up over padded TRL in core time, and of the floating-point operations relative to its,
    of each method of this package, now and at a revision. Changes of more than 3% are bold.
    """
    rows = []
    for path, result in results(root / "docs" / "benchmarks"):
        if "gpu" in result["environment"] or (before := earlier(root, revision, path)) is None:
            continue
        runs = {(run["rows"], run["batch_size"]): run["methods"] for run in before["runs"]}
        for run in result["runs"]:
            then = runs.get((run["rows"], run["batch_size"]), {})
            for name in (name for name in ("flat", "shared", "budget") if name in then and name in run["methods"]):
                old, new = then[name], run["methods"][name]
                change = new["core_speedup"] / old["core_speedup"] - 1
                flops = [m[name]["flops"] / m["trl"]["flops"] for m in (then, run["methods"])]
                cells = [path.removesuffix(".json"), f"{run['rows']}, batch {run['batch_size']}", name]
                cells += [f"{one['core_speedup']:.2f}x" for one in (old, new)]
                cells.append(f"**{change:+.0%}**" if abs(change) > NOTABLE else f"{change:+.0%}")
                rows.append([*cells, *(f"{share:.2%}" for share in flops)])
    return "\n".join(table(HEADS, rows, left=3)) + "\n"
