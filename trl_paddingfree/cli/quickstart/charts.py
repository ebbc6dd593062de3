"""Charts, as PNG files. They need matplotlib (`pip install "trl-paddingfree[plot]"`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from ...data.savings import WasteReport, waste_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour-blind safe, from the Okabe-Ito palette
COMPUTED, SHARED, PADDING = "#0072B2", "#56B4E9", "#D9D9D9"
# More bars than this cannot be told apart
MOST_BATCHES = 64


def figure(size: tuple[float, float] = (11, 4), sharey: bool = False) -> tuple["Figure", np.ndarray]:
    """A figure with two plots side by side, with one y-axis if they share it. It needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Charts need matplotlib: `pip install "trl-paddingfree[plot]"`.') from error
    drawing = Figure(figsize=size, layout="constrained")
    axes = drawing.subplots(1, 2, sharey=sharey)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return drawing, axes


def drawn(draw: Callable[[], None], path: str | Path, console: Console) -> None:
    """Draw a chart and say where it is, or why there is none."""
    try:
        draw()
        console.print(f"Chart: {path}", soft_wrap=True)
    except (ImportError, OSError) as error:
        console.print(f"No chart: {error}", markup=False, soft_wrap=True)


def plot_waste(report: WasteReport, path: str | Path) -> None:
    """Draw how long sequences are, and which slots of padded batches are padding, shared or computed."""
    drawing, (left, right) = figure()
    lengths = np.asarray(report.lengths)
    left.hist(np.minimum(lengths, np.percentile(lengths, 99.5)), bins=50, color=COMPUTED)
    if report.max_length is not None and report.max_length < lengths.max():
        left.axvline(report.max_length, color="black", linestyle="--", linewidth=1, label="max_length")
        left.legend(frameon=False)
    left.set(xlabel="tokens per sequence", ylabel="sequences", title="Lengths, before truncation")

    batch_size, batches = next(iter(report.batches.items()))
    waste, ordered = waste_of(batches), sorted(batches, key=lambda counts: counts.padded)
    shown = np.array([counts.as_tuple()[:3] for counts in ordered[:: -(-len(ordered) // MOST_BATCHES)]])
    share, padding = 1 / waste["predicted_speed_up_with_sharing"], waste["wasted_by_padding"]
    labels = {
        f"computed without padding ({share:.0%})": COMPUTED,
        f"in another row already ({1 - padding - share:.0%})": SHARED,
        f"padding ({padding:.0%})": PADDING,
    }
    bottom = 0
    for top, (label, color) in zip(shown.T, labels.items(), strict=True):
        right.bar(range(len(shown)), top - bottom, bottom=bottom, width=1, color=color, label=label)
        bottom = top
    right.legend(frameon=False, loc="upper left")
    right.set(
        xlabel=f"batches of {batch_size}, from small to large",
        ylabel="slots of the padded batch",
        title=f"Slots per batch: {1 / share:.2f}x fewer computed",
        xticks=[],
        ylim=(0, 1.3 * shown.max()),  # room for the legend
    )
    drawing.savefig(path, dpi=150)


def plot_runs(
    losses: Mapping[str, Sequence[float]], figures: dict[str, dict[str, float]], title: str, path: str | Path
) -> None:
    """Draw the losses of two runs into one plot, and beside it bars of their figures, relative to the first run."""
    drawing, (left, right) = figure()
    (first, second), places = losses, np.arange(len(figures))
    ratios = [values[second] / values[first] if values[first] else 1.0 for values in figures.values()]
    for name, width, line, place, heights, color in (
        (first, 5, "#CCCCCC", places - 0.2, [1.0] * len(ratios), "#999999"),
        (second, 1.5, COMPUTED, places + 0.2, ratios, COMPUTED),
    ):
        left.plot(range(1, 1 + len(losses[name])), losses[name], label=name, linewidth=width, color=line)
        bars = right.bar(place, heights, width=0.4, color=color, label=name)
        values = (each[name] for each in figures.values())
        right.bar_label(bars, [f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in values])
    right.bar_label(bars, [f"{ratio:.0%}" for ratio in ratios], label_type="center", color="white")
    left.legend(frameon=False)
    left.set(xlabel="step", ylabel="loss", title=f"Loss, {title}")
    right.set(xticks=places, xticklabels=[*figures], ylabel=f"relative to {first}", ylim=(0, 1.2 * max(1.15, *ratios)))
    right.legend(frameon=False, loc="upper right")
    drawing.savefig(path, dpi=150)
