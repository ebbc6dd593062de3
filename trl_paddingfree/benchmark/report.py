"""Results as JSON, a Markdown table and a chart."""

import json
from pathlib import Path
from typing import Any

from ..trainers.memory_budget import GIB
from .chart import chart
from .environment import machine_name
from .shapes import display_name
from .tasks import BENCHMARKED


def conditions(result: dict[str, Any]) -> str:
    """One sentence: what was measured, with what."""
    s, versions = result["settings"], result["environment"]["packages"]
    parts = [
        display_name(s["model"]),
        {"full": "all weights trained", "lora": "LoRA r=16 on all linear layers", "qlora": "QLoRA r=16"}[s["tuning"]],
        s["dtype"],
        f"max length {s['max_length']}",
        f"gradient checkpointing {'on' if s['gradient_checkpointing'] else 'off'}",
    ]
    if BENCHMARKED[s["task"]].has_reference:
        parts.append("precomputed reference" if s["precomputed_reference"] else "reference computed in the step")
    parts += [name for name, on in (("Liger kernels", s["liger"]), ("torch.compile", s["torch_compile"])) if on]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "torch"))
    return f"{s['task'].upper()}, {', '.join(parts)}. {machine_name(result['environment'])}; {packages}."


def unit(result: dict[str, Any]) -> str:
    """What is counted per second."""
    return f"{BENCHMARKED[result['settings']['task']].unit}/s"


def _cells(result: dict[str, Any], run: dict[str, Any], name: str) -> list[str]:
    """One row of the table."""
    method, cuda = run["methods"][name], "gpu" in result["environment"]
    cells = [method["label"], f"{method['loss']:.6f}"]
    cells += [f"{method['tokens_over_limit']:.2f}", f"{method['flops_over_limit']:.2f}"]
    if "speedup" not in method:
        return [*cells, *["losses disagree"] * (len(columns(result)) - 5)]
    spread, parts = method["speedup_spread"], method["parts"]
    seconds = sum(parts.values())
    cells += [
        f"{method['examples_per_second']:.3g}",
        f"**{method['speedup']:.2f}** ({spread['p20']:.2f} to {spread['p80']:.2f})",
    ]
    if not cuda:
        cells.append(f"{method['core_speedup']:.2f}")
    cells += [f"{method['tokens_per_second']:,.0f}", f"{method['useful_mfu']:.0%}"]
    cells.append(" / ".join(f"{parts[part] / seconds:.0%}" for part in ("data", "forward", "backward", "optimizer")))
    if cuda:
        state = result["bytes_of_state"][name]
        cells += [f"{(state + method['bytes_above']) / GIB:.1f}", f"{method['bytes_above'] / GIB:.1f}"]
        cells.append(str(method["syncs_per_pass"]) if method["syncs_per_pass"] is not None else "")
    return cells


def columns(result: dict[str, Any]) -> list[str]:
    """Heads of the table."""
    heads = ["lengths", "method", "mean loss", "tokens / limit", "FLOPs / limit", unit(result), "speed-up (20 to 80 %)"]
    if "gpu" not in result["environment"]:
        heads.append("in core time")
    heads += ["real tokens/s", "useful MFU", "data / forward / backward / optimizer"]
    return heads + (["peak GiB", "above weights", "syncs"] if "gpu" in result["environment"] else [])


def markdown(result: dict[str, Any]) -> str:
    """The results as a table, with what a reader needs to judge them."""
    heads = columns(result)
    lines = [conditions(result), "", "| " + " | ".join(heads) + " |", "|" + "-|" * 2 + "-:|" * (len(heads) - 2)]
    for run in result["runs"]:
        for i, name in enumerate(run["methods"]):
            cells = [f"{run['rows']}, batch {run['batch_size']}" if i == 0 else "", *_cells(result, run, name)]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *notes(result), "", "```", result["command"], "```", ""]
    return "\n".join(lines)


def notes(result: dict[str, Any]) -> list[str]:
    """What the figures mean."""
    lines = [
        f"Attention: TRL has {result['attention']['trl']}; ours is {result['attention']['ours']}. The limit computes "
        "each node of the tree that a batch's rows form once. Useful MFU: operations that the limit needs for a step, "
        "without recomputation, over the step's time and over the rate of matrix products in the same run "
        f"({result['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s).",
        *(["All methods run with an allocator that keeps its pages."] if result.get("keeps_pages") else []),
        "",
    ]
    return lines + [line for run in result["runs"] for line in _run_notes(run)]


def _run_notes(run: dict[str, Any]) -> list[str]:
    """Whether the methods agree on some rows, and how typical the measured batches are."""
    largest = {
        name: max(values[name] for values in run["differences"].values() if name in values)
        for name in next(iter(run["differences"].values()))
    }
    figures = ", ".join(f"{name} {value:.0e} (allowed {run['allowed'][name]:.0e})" for name, value in largest.items())
    verdict = "agree" if run["agree"] else "DO NOT AGREE, no speed is reported"
    packing = run["packing_difference"]
    whole = by_label(run, run["all_batches"]["flops_over_limit"], "{:.2f}")
    lines = [
        f"- {run['rows']}: the {run['batches']} most typical batches of {run['batch_size']}, {run['rounds']} times "
        f"each, in turn. All figures {verdict}; largest relative differences: {figures}"
        f"{'' if packing is None else f', loss of the packed rows {packing:.0e}'}. "
        f"FLOPs / limit over {run['all_batches']['batches']} batches of the data: {whole}."
    ]
    if run.get("do_not_fit"):
        lines.append(f"  Does not fit into memory: {', '.join(run['do_not_fit'])}.")
    if run["profile"]:
        shares = by_label(run, {name: profile["gather"] for name, profile in run["profile"].items()}, "{:.1%}")
        lines.append(f"  Share of the gather of keys and values, with its gradient, in a step: {shares}.")
    return lines


def by_label(run: dict[str, Any], values: dict[str, float], form: str) -> str:
    """A list of one figure per method."""
    return "; ".join(f"{run['methods'][name]['label']} {form.format(value)}" for name, value in values.items())


def write(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """
    Write `name.json`, `name.md` and, if matplotlib is installed, `name.png` into a folder.

    Returns:
        `list[Path]`: The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.json", folder / f"{name}.md"]
    files[0].write_text(json.dumps(result, indent=1) + "\n")
    files[1].write_text(markdown(result))
    try:
        chart(result, folder / f"{name}.png", conditions(result))
        files.append(folder / f"{name}.png")
    except ImportError:
        print("No chart: matplotlib is not installed. `python scripts/benchmark.py --render RESULT.json` draws it.")
    return files
