"""Results as a chart."""

from pathlib import Path
from textwrap import fill
from typing import Any

from .tasks import BENCHMARKED

COLORS = {
    "trl": "#9a9a9a",
    "trl-kept": "#6b6b6b",
    "trl-packing": "#c9b458",
    "trl-padding-free": "#d98a4e",
    "flat": "#5b8ec9",
    "shared": "#1f4e9c",
    "budget": "#0b2a5c",
}


def chart(result: dict[str, Any], path: Path, title: str) -> None:
    """
    Draw bars of speed, and of memory or operations, relative to padded TRL.

    Args:
        result (`dict[str, Any]`):
            Results of the benchmark.
        path (`Path`):
            PNG file to write.
        title (`str`):
            What was measured, with what.

    Raises:
        `ImportError`: If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in result["runs"] if run["agree"]]
    examples = BENCHMARKED[result["settings"]["task"]].unit
    panels = [("speedup", f"{examples} per second, padded TRL = 1 (longer is better)")]
    if "gpu" in result["environment"]:
        panels.append(("bytes_above", "memory above the weights, padded TRL = 1 (shorter is better)"))
    else:
        panels.append(("flops", "operations, padded TRL = 1 (shorter is better)"))
    names = list(runs[0]["methods"]) if runs else []
    figure, axes = pyplot.subplots(
        1, 2, figsize=(12, 1.2 + 0.3 * len(runs) * (len(names) + 1)), sharey=True, layout="constrained"
    )
    for axis, (key, heading) in zip(axes, panels, strict=True):
        for place, run in enumerate(runs):
            base = run["methods"]["trl"][key]
            for i, name in enumerate(names):
                method, y = run["methods"][name], place * (len(names) + 1) + i
                value = method[key] / base
                axis.barh(y, value, color=COLORS[name], height=0.9)
                axis.text(value, y, f" {value:.2f}  {method['label']}", va="center", fontsize=8)
        axis.set_title(heading, fontsize=10)
        axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        axis.margins(x=0.45)
        axis.spines[["top", "right"]].set_visible(False)
    middle = (len(names) - 1) / 2
    axes[0].set_yticks(
        [i * (len(names) + 1) + middle for i in range(len(runs))],
        [f"{_wrapped(r['rows'])}\nbatch {r['batch_size']}" for r in runs],
    )
    axes[0].invert_yaxis()
    figure.suptitle(fill(title, 140), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _wrapped(name: str) -> str:
    return name.replace(", ", "\n").replace("pref_", "").replace("sft_", "")
