"""Results as a Markdown table and a chart."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from trl_paddingfree.cli.quickstart.charts import figure
from trl_paddingfree.core.device import GIB

from .environment import machine_name
from .tasks import BENCHMARKED
from .trainers import display_name

COLORS = {
    "trl": "#9a9a9a",
    "trl-kept": "#6b6b6b",
    "trl-two-boundaries": "#c4c4c4",
    "trl-packing": "#c9b458",
    "trl-padding-free": "#d98a4e",
    "flat": "#5b8ec9",
    "shared": "#1f4e9c",
    "budget": "#0b2a5c",
    "compiled": "#5b2a86",
}


def conditions(result: dict[str, Any]) -> str:
    """One sentence: what was measured, with what."""
    s, versions = result["settings"], result["environment"]["packages"]
    parts = [
        display_name(s["model"]),
        {"full": "all weights trained", "lora": "LoRA r=16 on all linear layers"}[s["tuning"]],
        s["dtype"],
        f"max length {s['max_length']}",
        f"gradient checkpointing {'on' if s['gradient_checkpointing'] else 'off'}",
    ]
    if BENCHMARKED[s["task"]].has_reference:
        parts.append("precomputed reference" if s["precomputed_reference"] else "reference computed in the step")
    packages = ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "torch"))
    return f"{s['task'].upper()}, {', '.join(parts)}. {machine_name(result['environment'])}; {packages}."


def disagreeing(run: dict[str, Any], name: str) -> list[str]:
    """The figures of a method that are further from padded TRL's than is allowed."""
    return [figure for figure, off in run["differences"].get(name, {}).items() if not off <= run["allowed"][figure]]


def flag(run: dict[str, Any], name: str) -> str:
    """What to say beside a speed-up if figures disagree."""
    return f" ({', '.join(figures)} DISAGREE)" if (figures := disagreeing(run, name)) else ""


def _cells(result: dict[str, Any], run: dict[str, Any], name: str) -> dict[str, str]:
    """The cells of a method, by the heads of the table."""
    method, on_gpu = run["methods"][name], "gpu" in result["environment"]
    spread, parts = method["speedup_spread"], method["parts"]
    seconds, above = sum(parts.values()), method["bytes_above"]
    cells = {
        "lengths": f"{run['rows']}, batch {run['batch_size']}" if name == "trl" else "",
        "method": method["label"],
        "mean loss": f"{method['loss']:.6f}",
        "tokens / limit": f"{method['tokens_over_limit']:.2f}",
        "FLOPs / limit": f"{method['flops_over_limit']:.2f}",
        f"{BENCHMARKED[result['settings']['task']].unit}/s": f"{method['examples_per_second']:.3g}",
        "speed-up (20 to 80 %)": (
            f"**{method['speedup']:.2f}** ({spread['p20']:.2f} to {spread['p80']:.2f}){flag(run, name)}"
        ),
        **({} if on_gpu else {"in core time": f"{method['core_speedup']:.2f}"}),
        "real tokens/s": f"{method['tokens_per_second']:,.0f}",
        "useful MFU": f"{method['useful_mfu']:.0%}",
        " / ".join(parts): " / ".join(f"{part / seconds:.0%}" for part in parts.values()),
    }
    if on_gpu:
        cells["peak GiB"] = f"{(result['bytes_of_state'][name] + above) / GIB:.1f}"
        cells["above weights"] = f"{above / GIB:.1f}"
        cells["syncs"] = "" if method["syncs_per_pass"] is None else str(method["syncs_per_pass"])
    return cells


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a Markdown table, in which so many columns are aligned on the left, and all others on the right."""
    aligned = "|" + "-|" * left + "-:|" * (len(heads) - left)
    first, *others = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [first, aligned, *others]


def markdown(result: dict[str, Any]) -> str:
    """The results as a table, with what a reader needs to judge them."""
    rows = [_cells(result, run, name) for run in result["runs"] for name in run["methods"]]
    lines = [
        *(conditions(result), ""),
        *table([*rows[0]], [[*cells.values()] for cells in rows], left=2),
        "",
        f"TRL computes attention with {result['attention']['trl']}, this package with {result['attention']['ours']}. "
        "The rows of a batch form a tree, and the limit computes each node of it once. The useful MFU is the number of "
        "operations that the limit needs for a step without recomputation, over the step's time and over the rate of "
        f"matrix products in the same run ({result['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s).",
        *(["All methods run with an allocator that keeps its pages."] if result["keeps_pages"] else []),
        "",
        *(line for run in result["runs"] for line in _notes(run)),
        *("", "```", result["command"], "```", ""),
    ]
    return "\n".join(lines)


def _notes(run: dict[str, Any]) -> list[str]:
    """Whether the methods agree on some rows, how typical the measured batches are, and what computed them."""
    largest: dict[str, float] = {}
    for values in run["differences"].values():
        largest |= {name: max(largest.get(name, 0.0), off) for name, off in values.items()}
    figures = ", ".join(f"{name} {value:.0e} (allowed {run['allowed'][name]:.0e})" for name, value in largest.items())
    packing = run["packing_difference"]
    whole = by_label(run, run["all_batches"]["flops_over_limit"], "{:.2f}")
    lines = [
        f"- {run['rows']}: The methods took turns on the most typical batches of {run['batch_size']} (number of "
        f"batches: {run['batches']}, of rounds: {run['rounds']}). All figures "
        f"{'agree' if run['agree'] else 'DO NOT AGREE'}; largest relative differences: {figures}"
        f"{'' if packing is None else f', loss of the packed rows {packing:.0e}'}. "
        f"FLOPs / limit over {run['all_batches']['batches']} batches of the data: {whole}."
    ]
    lines += [f"  {label} is left out: {' '.join(reason.split())}" for label, reason in run["failed"].items()]
    operators = {name: method["attention_operators"] for name, method in run["methods"].items()}
    if found := {name: ", ".join(f"`{each}`" for each in named) for name, named in operators.items() if named}:
        lines.append(f"  Attention is computed by: {by_label(run, found, '{}')}.")
    if run["profile"]:
        shares = by_label(run, {name: profile["gather"] for name, profile in run["profile"].items()}, "{:.1%}")
        lines.append(f"  Share of the gather of keys and values, with its gradient, in a step: {shares}.")
    return lines


def by_label(run: dict[str, Any], values: dict[str, Any], form: str) -> str:
    """A list of one figure per method."""
    return "; ".join(f"{run['methods'][name]['label']} {form.format(value)}" for name, value in values.items())


def chart(result: dict[str, Any], path: Path) -> None:
    """Draw bars of speed, and of memory or operations, relative to padded TRL. Needs matplotlib."""
    runs, examples = result["runs"], BENCHMARKED[result["settings"]["task"]].unit
    panels = [("speedup", f"{examples} per second, padded TRL = 1 (longer is better)")]
    if "gpu" in result["environment"]:
        panels.append(("bytes_above", "memory above the weights, padded TRL = 1 (shorter is better)"))
    else:
        panels.append(("flops", "operations, padded TRL = 1 (shorter is better)"))
    bars = max(len(run["methods"]) for run in runs) + 1
    drawing, axes = figure((12, 1.2 + 0.3 * len(runs) * bars), sharey=True)
    for axis, (key, heading) in zip(axes, panels, strict=True):
        for place, run in enumerate(runs):
            base = run["methods"]["trl"][key] or 1  # memory, where the device does not say
            for i, (name, method) in enumerate(run["methods"].items()):
                value, y = method[key] / base, place * bars + i
                axis.barh(y, value, color=COLORS[name], height=0.9)
                axis.text(value, y, f" {value:.2f}  {method['label']}{flag(run, name)}", va="center", fontsize=8)
        axis.set_title(heading, fontsize=10)
        axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        axis.margins(x=0.45)
    axes[0].set_yticks(
        [i * bars + (bars - 2) / 2 for i in range(len(runs))],
        [f"{_wrapped(run['rows'])}\nbatch {run['batch_size']}" for run in runs],
    )
    axes[0].invert_yaxis()
    drawing.suptitle(fill(conditions(result), 140), fontsize=9)
    drawing.savefig(path, dpi=110)


def _wrapped(name: str) -> str:
    return name.replace(", ", "\n").replace("pref_", "").replace("sft_", "")
