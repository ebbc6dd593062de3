"""Results as JSON, a Markdown table and a chart."""

import json
from pathlib import Path
from typing import Any

from .environment import machine_name
from .shapes import display_name

GIB = 2**30


def conditions(result: dict[str, Any]) -> str:
    """One sentence: what was measured, with what."""
    s, versions = result["settings"], result["environment"]["packages"]
    parts = [
        display_name(s["model"]),
        {"full": "all weights trained", "lora": "LoRA r=16 on all linear layers", "qlora": "QLoRA r=16"}[s["tuning"]],
        s["dtype"],
        f"batch {s['batch_size']}",
        f"max length {s['max_length']}",
        f"gradient checkpointing {'on' if s['gradient_checkpointing'] else 'off'}",
    ]
    if s["task"] == "dpo":
        parts.append("precomputed reference" if s["precomputed_reference"] else "reference computed in the step")
    parts += [name for name, on in (("Liger kernels", s["liger"]), ("torch.compile", s["torch_compile"])) if on]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "torch"))
    return f"{s['task'].upper()}, {', '.join(parts)}. {machine_name(result['environment'])}; {packages}."


def unit(result: dict[str, Any]) -> str:
    """What is counted per second."""
    return "pairs/s" if result["settings"]["task"] == "dpo" else "rows/s"


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
            cells = [run["rows"] if i == 0 else "", *_cells(result, run, name)]
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
        "",
    ]
    for run in result["runs"]:
        largest = [max(values.values()) for values in run["differences"].values()]
        verdict = "agree" if run["agree"] else "DISAGREE: no speed is reported"
        packing = run["packing_difference"]
        lines.append(
            f"- {run['rows']}: {run['batches']} batches, {run['rounds']} times each, in turn. Losses, gradient norms "
            f"and metrics {verdict}: largest relative difference {max(largest):.1e}, allowed {run['tolerance']:.0e}"
            + (f"; packed rows {packing:.1e}" if packing is not None else "")
            + ". FLOPs / limit over all "
            f"{run['all_batches']['batches']} batches of the data: "
            + ", ".join(
                f"{run['methods'][name]['label']} {ratio:.2f}"
                for name, ratio in run["all_batches"]["flops_over_limit"].items()
            )
            + "."
        )
    return lines


COLORS = {
    "trl": "#9a9a9a",
    "trl-packing": "#c9b458",
    "trl-padding-free": "#d98a4e",
    "flat": "#5b8ec9",
    "shared": "#1f4e9c",
}


def chart(result: dict[str, Any], path: Path) -> None:
    """Bars of speed and, where it is known, of memory, relative to padded TRL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in result["runs"] if run["agree"]]
    panels = [("speedup", f"{unit(result)}, padded TRL = 1 (longer is better)")]
    if "gpu" in result["environment"]:
        panels.append(("bytes_above", "memory above the weights, padded TRL = 1 (shorter is better)"))
    else:
        panels.append(("flops", "FLOPs, padded TRL = 1 (shorter is better)"))
    names = list(runs[0]["methods"]) if runs else []
    figure, axes = pyplot.subplots(
        1, 2, figsize=(12, 1.2 + 0.3 * len(runs) * (len(names) + 1)), sharey=True, layout="constrained"
    )
    for axis, (key, title) in zip(axes, panels, strict=True):
        for place, run in enumerate(runs):
            base = run["methods"]["trl"][key]
            for i, name in enumerate(names):
                method, y = run["methods"][name], place * (len(names) + 1) + i
                value = method[key] / base
                axis.barh(y, value, color=COLORS[name], height=0.9)
                axis.text(value, y, f" {value:.2f}  {method['label']}", va="center", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        axis.margins(x=0.45)
        axis.spines[["top", "right"]].set_visible(False)
    middle = (len(names) - 1) / 2
    axes[0].set_yticks([i * (len(names) + 1) + middle for i in range(len(runs))], [_wrapped(r["rows"]) for r in runs])
    axes[0].invert_yaxis()
    figure.suptitle(conditions(result), fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _wrapped(name: str) -> str:
    return name.replace(", ", "\n").replace("pref_", "").replace("sft_", "")


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
        chart(result, folder / f"{name}.png")
        files.append(folder / f"{name}.png")
    except ImportError:
        print(
            "matplotlib is not installed: no chart. `pip install matplotlib` and `--chart RESULT.json` draw it later."
        )
    return files
