"""Results as tables in the terminal."""

from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ..check.report import ModelReport
from ..data.savings import WasteReport
from ..memory.device import GIB


def _of_figures(title: str, heads: list[str]) -> Table:
    """A table of many columns that fits into a terminal: cells have no padding, and heads take several lines."""
    return Table(*(Column(head, justify="right") for head in heads), title=title, title_justify="left", padding=0)


def print_waste(report: WasteReport) -> None:
    """What padding wastes and sharing saves, as a table."""
    figures = report.as_dict()
    lengths, unit = figures["lengths"], report.task.unit
    sequence = "sequence" if report.task.truncates else "prompt"  # lengths of completions to generate are an option
    table = _of_figures(
        f"{report.task.name.upper()}: {report.num_sampled:,} of {report.num_rows:,} {unit}",
        ["batch\nsize", "slots", "tokens", "computed", "padding", "shared", "speed-up", "+ sharing"],
    )
    for row in figures["batch_sizes"]:
        totals = (row[name] / row["num_batches"] for name in ("padded_slots", "real_tokens", "computed_tokens"))
        table.add_row(
            f"{row['batch_size']}",
            *(f"{total:,.0f}" for total in totals),
            f"{row['wasted_by_padding']:.0%}",
            f"{row['saved_by_sharing']:.0%}",
            f"{row['predicted_speed_up']:.2f}x",
            f"{row['predicted_speed_up_with_sharing']:.2f}x",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Tokens per {sequence}: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, 90% under "
        f"{lengths['p90']:.0f}, 99% under {lengths['p99']:.0f}, longest {lengths['max']}."
    )
    if report.max_length is not None:
        console.print(
            f"max_length {report.max_length} truncates {report.num_truncated:,} of {report.num_sampled:,} {unit} and "
            f"drops {report.num_dropped:,}, which would have nothing left to learn from."
        )
    console.print(
        "slots, tokens, computed: of a mean batch, with padding, without, and with shared prefixes. padding: share of "
        "the slots. shared: share of the tokens that need no computing, because another row has them. speed-up: slots "
        "per token that is computed, which large models on a busy GPU come near to."
    )


def print_memory(memory: dict[str, Any]) -> None:
    """What [`~trl_paddingfree.cli.memory.memory_report`] predicts, as a table."""
    has_limit = memory["memory_gib"] is not None
    heads = ["batch\nsize", "layout", "tokens", "kept", "recom-\nputed", "off-\nloaded", "host"]
    heads += ["largest,\nrecom-\nputed", "largest,\nkept", "speed-\nup"] * has_limit
    table = _of_figures(f"Memory of {memory['model']}, {memory['tuning']}, bfloat16, in GiB", heads)
    for row in memory["sizes"]:
        for layout in ("padded", "padding_free", "shared"):
            found = row[layout]
            gib = (found[name] for name in ("kept_gib", "recomputed_gib", "offloaded_gib", "host_gib"))
            cells = [f"{found['tokens']:,}", *(f"{size:.1f}" for size in gib)]
            if has_limit:
                cells += [f"{found['recomputed_batch']}", f"{found['kept_batch']}", f"{found['speed_up']:.2f}x"]
            table.add_row(f"{row['batch_size']}" if layout == "padded" else "", layout.replace("_", "-"), *cells)
    console = Console()
    console.print(table)
    limit = ""
    if has_limit:
        limit = (
            f" largest: batch size that fits into {memory['memory_gib']:g} GiB. speed-up: of `memory_budget` over "
            "recomputing every layer, on the same tokens."
        )
    console.print(
        "tokens: of the largest batch. kept, recomputed: with no layer recomputed, and with every layer; weights, "
        f"gradients and the optimizer are {memory['fixed_gib']:.1f} GiB of it. offloaded: with every layer recomputed, "
        f"and `activation_offloading=True`, which keeps the rest in host memory.{limit}"
    )


def print_routes(report: ModelReport) -> None:
    """What the start-up check found, as a table, and how the model would train."""
    title = f"{report.model} on {report.device}, {report.dtype}, {report.attn_implementation}"
    table = Table("backend", "prefixes", "verdict", "error", "allowed", "leak", title=title, title_justify="left")
    for backend, (results, _) in report.backends.items():
        for result in results:
            figures = [f"{figure:.1e}" for figure in (result.error, result.tolerance, result.leak)]
            table.add_row(backend, "shared" if result.prefix_sharing else "not shared", result.verdict, *figures)
        if not results:
            table.add_row(backend, "", "not here")
    console = Console()
    console.print(table)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if report.chosen is None:
        say(f"\nRefused. {report.refusal}")
        return
    say(f"\nTrains as {report.chosen}.")
    faster = [*report.backends][: [*report.backends].index(report.chosen.route.backend)]
    if faster:
        say("\nFaster, if it can be had:")
    for results, reasons in map(report.backends.__getitem__, faster):
        for text in [reasons] if reasons else map(str, results):
            say(text)


def summarize(trainer: Any, metrics: dict[str, float], seconds: float) -> None:
    """Print what the run took and what it computed, on the main process."""
    counts = trainer.total_counts()
    memory = trainer.flat.peak_memory
    if not trainer.accelerator.is_main_process:
        return
    examples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    figures = {
        "time": f"{seconds:.1f} s",
        "optimizer steps": f"{trainer.state.global_step}",
        "final loss": f"{metrics['train_loss']:.4f} (mean over the run)",
        f"{trainer.sample_unit} per second": f"{examples / seconds:.2f}",
        "real tokens per second": f"{counts.real / seconds:,.0f}",
        "tokens computed": f"{counts.computed:,}",
        "slots of the padded batches": f"{counts.padded:,}",
        "computed, of padded": f"{counts.computed / max(counts.padded, 1):.1%}",
        memory.name: f"{memory.highest / GIB:.2f} GiB",
    }
    if counts.distinct:
        figures["computed, of distinct tokens"] = f"{counts.computed / counts.distinct:.1%}"
    table = Table(title=f"Trained by {trainer.method}", show_header=False, title_justify="left")
    for name, value in figures.items():
        table.add_row(name, value)
    Console().print(table)
