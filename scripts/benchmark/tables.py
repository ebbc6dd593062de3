"""The tables of results in the documentation, written from the results in docs/benchmarks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .environment import machine_name
from .report import flag, table
from .tasks import BASELINE
from .trainers import display_name

# Padded TRL that recomputes nothing
KEPT = "trl-kept"
# What the README shows: by task and rows, and what people call these
HEADLINE = {
    ("dpo", "ultrafeedback_1000"): "DPO, UltraFeedback",
    ("dpo", "hh_harmless_1500"): "DPO, Anthropic HH",
    ("sft", "p3_flanlike_clear_5000"): "SFT, P3",
    ("sft", "gsm8k_train_3000"): "SFT, GSM8K",
    ("sft", "sgd_multiturn_1500, one sample per turn"): "SFT, agents: a sample per turn",
}
# What a reader understands without a legend
HEADLINE_HEADS = (
    "training",
    "speed",
    "peak memory",
    "with a budget of 24 GB",
    "log-probabilities differ by",
    "gradient norms differ by",
)
# What a trainer does by default, and samples of turns with `prefix_sharing=True`
METHODS = {"dpo": "shared", "sft": "flat", "sft-turns": "shared"}
HEADS = (
    *("machine, model", "rows", "padding-free", "with shared prefixes", "with `memory_budget`"),
    *("FLOPs", "FLOPs / limit"),
)
KEPT_HEADS = (
    *("machine, model", "rows", "TRL, nothing recomputed", "shared prefixes", "with `memory_budget`"),
    *("the same / TRL, nothing recomputed", "FLOPs / TRL", "FLOPs / TRL, nothing recomputed"),
)
KEPT_EXPLANATION = (
    "Activations that fit into memory need not be recomputed. This table compares padded TRL with "
    "`gradient_checkpointing=False`, and `memory_budget`, which keeps what fits by itself. It has examples per second "
    "relative to padded TRL with its defaults, unless a column names the other baseline. All methods run with an "
    "allocator that keeps its pages."
)
EXPLANATION = (
    "The first columns have examples per second relative to padded TRL in the same run, and in brackets, on CPUs, the "
    "same in core time. The last two have floating-point operations with shared prefixes, relative to padded TRL's and "
    "to the fewest possible."
)
CHOICE_HEADS = ("SFT with", "computes", "exact", "needs")
COST_HEADS = (
    *("SFT with", "tokens / fewest", "FLOPs / fewest", "speed", "peak memory"),
    *("steps of an epoch", "tokens lost to `max_length`"),
)
# By method, what it is in the study of packing, and whether it cuts rows: TRL refuses `max_length` where it does not
STEPS = {"trl-packing": "bfd"}
NEVER_CUTS = "trl-padding-free"
# What a user can choose for SFT, by method: what it computes, whether it is exact, and what it needs
CHOICES = {
    "trl": ("TRL, padded", "all rows at the width of the longest", "yes: the others are compared with it", "nothing"),
    "trl-kept": ("TRL, `gradient_checkpointing=False`", "the same; no layer recomputes", "yes", "memory"),
    "trl-padding-free": (
        "TRL, `padding_free=True`",
        "real tokens; without flash attention, every pair of them in attention, under a mask",
        "if the model keeps rows apart: [some do not](packed.md), and nothing says so",
        "`max_length=None`, rows that you have truncated, and flash attention to be fast",
    ),
    "trl-packing": (
        "TRL, `packing=True`",
        "rows of `max_length` tokens, each filled with several examples; pairs of tokens as above",
        "the same, and each step holds more examples",
        "a learning rate for [fewer, larger steps](benchmarks/packing.md), and flash attention to be fast",
    ),
    "flat": (
        "this package",
        "real tokens, and in attention the pairs within each row",
        "proven [on your model and on your batches](accuracy.md#what-is-proven-when)",
        "a model that passes: [most do](models.md)",
    ),
    "shared": ("its `prefix_sharing=True`", "the same, and what rows start with once", "the same", "the same"),
    "budget": (
        'and its `memory_budget="auto"`',
        "the same; as few layers recompute as memory requires",
        "the same",
        "the same",
    ),
}


def results(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All results in the folders of all machines, with their paths, plain ones before their variants."""
    return [
        (str(path.relative_to(folder)), result)
        for path in sorted(folder.glob("*/*.json"), key=lambda path: path.with_suffix(""))
        if "runs" in (result := json.loads(path.read_text()))
    ]


def speedups(names: tuple[str, ...], run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """
    The speed-up of each method, empty where it was not measured.

    On a CPU also the one in core time, which other processes on the machine do not disturb.
    """
    cells = []
    for name in names:
        method = run["methods"].get(name)
        core = f" ({method['core_speedup']:.2f}x)" if method and "gpu" not in result["environment"] else ""
        cells.append(f"{method['speedup']:.2f}x{core}{flag(run, name)}" if method else "")
    return cells


def measured_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], list[str]]]:
    """Each measured set of rows: the path of its result, this, the run on the rows, and the first cells of a table."""
    for path, result in results(folder):
        settings, page = result["settings"], Path(path).with_suffix(".md").as_posix()
        machine = f"{machine_name(result['environment'])}, {display_name(settings['model'])}"
        reference = ", precomputed reference" if settings["precomputed_reference"] else ""
        for run in result["runs"]:
            trained = f"{settings['task'].upper()}, {run['rows']}, batch {run['batch_size']}{reference}"
            yield path, result, run, [f"[{machine}]({page})", trained]


def rows(folder: Path) -> list[tuple[str, list[str]]]:
    """For each measured set of rows: the name of its result, its cells of a table."""
    lines = []
    for path, result, run, first in measured_rows(folder):
        methods = run["methods"]
        ours = methods["shared" if "shared" in methods else "flat"]
        cells = [
            *first,
            *speedups(("flat", "shared", "budget"), run, result),
            f"{ours['flops'] / methods['trl']['flops']:.0%}",
            f"{ours['flops_over_limit']:.3f}",
        ]
        lines.append((Path(path).stem, cells))
    return lines


def kept(folder: Path) -> list[str]:
    """A table of the results that have the baseline without recomputation."""
    lines = []
    for _, result, run, first in measured_rows(folder):
        methods = run["methods"]
        if not {"budget", KEPT} <= methods.keys():
            continue
        padded, ours = methods[KEPT], methods["budget"]
        cells = [
            *first,
            *speedups((KEPT, "shared", "budget"), run, result),
            f"{ours['speedup'] / padded['speedup']:.2f}x ({ours['core_speedup'] / padded['core_speedup']:.2f}x)",
            f"{ours['flops'] / methods['trl']['flops']:.0%}",
            f"{ours['flops'] / padded['flops']:.0%}",
        ]
        lines.append(cells)
    return table(KEPT_HEADS, lines, left=2)


def chart(folder: Path) -> list[str]:
    """The newest chart of DPO."""
    dated = sorted((result["date"], path) for path, result in results(folder) if Path(path).stem == "dpo")
    charts = [chart for _, path in dated if (folder / (chart := Path(path).with_suffix(".png"))).exists()]
    return [f"![Speed-up over padded TRL]({charts[-1].as_posix()})", ""] if charts else []


def headline(folder: Path) -> str:
    """What the README shows: the newest result of each training."""
    newest: dict[tuple[str, str], list[str]] = {}
    for path, result in sorted(results(folder), key=lambda each: each[1]["date"]):
        for run in result["runs"]:
            key, name = (result["settings"]["task"], run["rows"]), Path(path).stem
            if key not in HEADLINE or name not in METHODS:
                continue
            speed, memory = speed_and_memory(run, result, METHODS[name])
            # The share would be read as a cost: a budget takes what is there
            budgeted = [cell.partition(" (")[0] for cell in speed_and_memory(run, result, "budget")]
            off = run["differences"][METHODS[name]]
            log_probs = [x for name, x in off.items() if name.startswith("logps/")] or [off["loss"]]  # SFT's: a mean
            off_by = f"{max(log_probs):.0e}", f"{off['grad_norm']:.0e}"
            page = f"docs/benchmarks/{Path(path).with_suffix('.md').as_posix()}"
            newest[key] = [
                f"[{HEADLINE[key]}]({page})",
                speed,
                memory,
                ", ".join(filter(None, budgeted)),
                *off_by,
            ]
    return "\n".join(table(HEADLINE_HEADS, [newest[key] for key in HEADLINE if key in newest]))


def speed_and_memory(run: dict[str, Any], result: dict[str, Any], name: str) -> tuple[str, str]:
    """
    The speed of a method over padded TRL; and its peak memory, weights included, in GB and as a share of padded TRL's.
    Empty where they were not measured.
    """
    methods, state = run["methods"], result["bytes_of_state"]
    if name not in methods:
        return "", ""
    above = {each: (methods[each] | run["profile"].get(each, {}))["bytes_above"] for each in (name, BASELINE)}
    peaks = [state[each] + above[each] for each in (name, BASELINE)]
    memory = f"{peaks[0] / 1e9:.1f} GB ({peaks[0] / peaks[1]:.0%})" if all(above.values()) else ""
    return f"{methods[name]['speedup']:.1f}x{flag(run, name)}", memory


def choices(folder: Path) -> str:
    """What a user has for SFT, TRL's ways and ours, with the newest figures and those of the study of packing."""
    dated = [(result["date"], path, result) for path, result in results(folder) if Path(path).stem == "sft"]
    if not dated:
        return ""
    _, path, result = max(dated, key=lambda each: each[0])
    runs, lines = result["runs"], []
    packing = {each["rows"]: each for each in json.loads((folder / "packing.json").read_text())["measured"]}
    epochs = [packing[f"sft_{run['rows']}"] for run in runs]
    for name, (label, *_) in CHOICES.items():
        found = [run["methods"][name] for run in runs if name in run["methods"]]
        packed = [epoch["methods"][STEPS.get(name, "padding_free")] for epoch in epochs]
        figures = (
            [f"{method['tokens_over_limit']:.2f}" for method in found],
            [f"{method['flops_over_limit']:.2f}" for method in found],
            [f"{method['speedup']:.1f}x" for method in found],
            [speed_and_memory(run, result, name)[1].partition(" (")[0] for run in runs],
            [f"{epoch['steps']}" for epoch in packed],
            [f"{0 if name == NEVER_CUTS else epoch['lost']:.0%}" for epoch in packed],
        )
        lines.append([label, *(", ".join(filter(None, each)) for each in figures)])
    environment, settings = result["environment"], result["settings"]
    rows = " and ".join(HEADLINE.get(("sft", run["rows"]), run["rows"]).removeprefix("SFT, ") for run in runs)
    page = f"benchmarks/{Path(path).with_suffix('.md').as_posix()}"
    explained = (
        f"These figures are for {rows}, [measured]({page}) on {machine_name(environment)}, with "
        f"{display_name(settings['model'])}, rows of at most {settings['max_length']} tokens, and attention by "
        f"{result['attention']['trl']}. Tokens and FLOPs are relative to the fewest that an exact method needs if "
        "every layer recomputes, and speed is relative to padded TRL. The last two columns are "
        f"[counted](benchmarks/packing.md) for {epochs[0]['batch_size']} rows of at most {epochs[0]['max_length']:,} "
        "tokens per step:"
    )
    said = table(CHOICE_HEADS, [list(each) for each in CHOICES.values()], left=4)
    return "\n".join([*said, "", explained, "", *table(COST_HEADS, lines)])


def everything(folder: Path) -> str:
    """What the page of all results shows: the claim, and the rows where there is little to gain."""
    measured = rows(folder)
    crossover = [cells for name, cells in measured if name.startswith("crossover")]
    claim = [cells for _, cells in measured if cells not in crossover]
    return "\n".join(
        [
            EXPLANATION,
            "",
            *table(HEADS, claim, left=2),
            "",
            *chart(folder),
            *(KEPT_EXPLANATION, "", *kept(folder), ""),
            "There is little to gain, or something to lose, where rows are equal or few, or a model is host-bound:",
            "",
            *table(HEADS, crossover, left=2),
        ]
    )


def between(page: str, marker: str, generated: str) -> str:
    """The page with `generated` between the markers."""
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    before, rest = page.split(start)
    return f"{before}{start}\n{generated}\n{end}{rest.split(end)[1]}"


def update(root: Path, check: bool) -> int:
    """
    Write the tables into the READMEs of all languages, the page of all results, and the page on moving here.

    With `check`, they are compared only. Returns 1 if a page is not what the results say, else 0.
    """
    folder, stale = root / "docs" / "benchmarks", False
    generated = {path: ("benchmark", headline(folder)) for path in sorted(root.glob("README*.md"))}
    generated[folder / "README.md"] = ("benchmark-tables", everything(folder))
    generated[folder.parent / "moving_here.md"] = ("benchmark-choices", choices(folder))
    for path, (marker, text) in generated.items():
        current = path.read_text(encoding="utf-8")
        updated = between(current, marker, text)
        if not check:
            path.write_text(updated, encoding="utf-8")
        elif updated != current:
            name = path.relative_to(root)
            print(f"{name} is out of date: run `python -m scripts.benchmark --readme`.")
            stale = True
    return int(stale)
