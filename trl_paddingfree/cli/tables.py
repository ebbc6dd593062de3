"""Results as tables in the terminal."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..core.device import GIB
from .report import ModelReport
from .savings import WasteReport


def table(title: str, heads: Iterable[str | Column], rows: Iterable[Iterable[str]], **style: Any) -> Table:
    """A table under a title of one line. `style` holds arguments of [`~rich.table.Table`]."""
    line = Text(title, "table.title", no_wrap=True, overflow="ignore")  # it may be wider than the columns
    made = Table(*heads, title=line, title_justify="left", **style)
    for row in rows:
        made.add_row(*row)
    return made


def right(*heads: str) -> list[Column]:
    """Right-aligned columns."""
    return [Column(head, justify="right") for head in heads]


def print_waste(report: WasteReport) -> None:
    """What padding wastes and sharing saves, as a table."""
    figures = report.as_dict()
    lengths, unit = figures["lengths"], report.unit
    sequence = "sequence" if report.task.truncates else "prompt"  # an option sets the length of completions to generate
    found = table(
        f"{report.task.name.upper()}: {report.num_sampled:,} of {report.num_rows:,} {unit}",
        right("batch\nsize", "slots", "tokens", "computed", "padding", "shared", "speed-up", "+ sharing"),
        [
            [
                f"{row['batch_size']}",
                f"{row['padded_slots'] / row['num_batches']:,.0f}",
                f"{row['real_tokens'] / row['num_batches']:,.0f}",
                f"{row['computed_tokens'] / row['num_batches']:,.0f}",
                f"{row['wasted_by_padding']:.0%}",
                f"{row['saved_by_sharing']:.0%}",
                f"{row['predicted_speed_up']:.2f}x",
                f"{row['predicted_speed_up_with_sharing']:.2f}x",
            ]
            for row in figures["batch_sizes"]
        ],
        padding=0,  # so that many columns fit into a terminal
    )
    notes = [
        f"Tokens per {sequence}: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, 90% under "
        f"{lengths['p90']:.0f}, 99% under {lengths['p99']:.0f}, longest {lengths['max']}."
    ]
    if report.more:
        more = SimpleNamespace(**report.more)
        notes.append(
            f"Pairs per prompt: {more.pairs_per_prompt:.1f}. Tokens per prompt: {more.tokens_of_one_pair_in_trl:,.0f} "
            f"for one pair in TRL without padding, {more.tokens_of_all_pairs_in_trl:,.0f} for all of them, and "
            f"{more.tokens_of_all_pairs:,.0f} for all of them here."
        )
    if report.max_length is not None:
        notes.append(
            f"max_length {report.max_length} truncates {report.num_truncated:,} of {report.num_sampled:,} {unit} and "
            f"drops {report.num_dropped:,}, which would have nothing left to learn from."
        )
    notes.append(
        "slots, tokens, computed: in a mean batch, with padding, without, and with shared prefixes. padding: share of "
        "the slots. shared: share of the tokens that are not computed, because another row has them. speed-up: slots "
        "per computed token, an upper bound that large models on a busy GPU approach."
    )
    Console().print(found, *notes, sep="\n")


def print_memory(memory: dict[str, Any]) -> None:
    """What [`~trl_paddingfree.budgets.predict.memory_report`] predicts, as a table."""
    heads = ["batch\nsize", "layout", "tokens", "kept", "recom-\nputed", "off-\nloaded", "host"]
    cells, limit = "{tokens:,} {kept_gib:.1f} {recomputed_gib:.1f} {offloaded_gib:.1f} {host_gib:.1f}", ""
    if memory["memory_gib"] is not None:
        heads += ["largest,\nrecom-\nputed", "largest,\nkept", "speed-\nup"]
        cells += " {recomputed_batch} {kept_batch} {speed_up:.2f}x"
        limit = (
            f" largest: the batch size that fits into {memory['memory_gib']:g} GiB. speed-up: of `memory_budget` over "
            "recomputing every layer, on the same tokens."
        )
    rows = [
        [shown, layout.replace("_", "-"), *cells.format_map(size[layout]).split()]
        for size in memory["sizes"]
        for shown, layout in ((f"{size['batch_size']}", "padded"), ("", "padding_free"), ("", "shared"))
    ]
    Console().print(
        table(f"Memory of {memory['model']}, {memory['tuning']}, bfloat16, in GiB", right(*heads), rows, padding=0),
        "tokens: in the largest batch. kept, recomputed: with no layer recomputed, and with every layer; "
        f"{memory['fixed_gib']:.1f} GiB of it are weights, gradients and optimizer state. offloaded, host: with every "
        f"layer recomputed and `activation_offloading=True`, on the device and in host memory.{limit}",
        sep="\n",
    )


def print_routes(report: ModelReport) -> None:
    """What the start-up check found, as a table, and how the model would train."""
    rows, lines = [], ["", f"Refused. {report.refusal}"]
    for backend, (results, _) in report.backends.items():
        found = [
            [
                backend,
                "shared" if result.prefix_sharing else "not shared",
                result.verdict,
                f"{result.error:.1e}",
                f"{result.tolerance:.1e}",
                f"{result.leak:.1e}",
            ]
            for result in results
        ]
        rows.extend(found or [[backend, "", "unavailable"]])
    title = f"{report.model} on {report.device}, {report.dtype}, {report.attn_implementation}"
    Console().print(table(title, ["backend", "prefixes", "verdict", "error", "allowed", "leak"], rows))
    if report.chosen is not None:
        lines, names = ["", f"Trains as {report.chosen}."], [*report.backends]
        if faster := names[: names.index(report.chosen.route.backend)]:
            lines += ["", "Faster backends, and what they need:"]
        for results, reasons in map(report.backends.__getitem__, faster):
            lines += [reasons] if reasons else map(str, results)
    Console().print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def summarize(trainer: Any, metrics: dict[str, float], seconds: float) -> None:
    """Print what the run took and what it computed, on the main process."""
    counts = trainer.total_counts()  # of all processes
    memory = trainer.runtime.peak_memory
    if not trainer.accelerator.is_main_process:
        return
    figures = {
        "time": f"{seconds:.1f} s",
        "optimizer steps": f"{trainer.state.global_step}",
        "mean loss of the run": f"{metrics['train_loss']:.4f}",
        f"{trainer.sample_unit} per second": (
            f"{metrics['train_samples_per_second'] * metrics['train_runtime'] / seconds:.2f}"
        ),
        "real tokens per second": f"{counts.real / seconds:,.0f}",
        "tokens computed": f"{counts.computed:,}",
        "with padding, these would be": f"{counts.padded:,}",
        "share computed": f"{counts.computed / max(counts.padded, 1):.1%}",
        memory.name: f"{memory.highest / GIB:.2f} GiB",
    }
    if counts.distinct:
        figures["fewest possible, each prefix once"] = f"{counts.distinct:,}"
    Console().print(table(f"Trained by {trainer.method}", ["", ""], figures.items(), show_header=False))
