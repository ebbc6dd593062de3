"""Charts, as PNG files. They need matplotlib (`pip install "trl-paddingfree[plot]"`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from ..savings import WasteReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Color-blind safe, from the Okabe-Ito palette
COMPUTED, SHARED, PADDING = "#0072B2", "#56B4E9", "#D9D9D9"
# More bars than this cannot be told apart
MOST_BATCHES = 64


def figure(size: tuple[float, float] = (11, 4), sharey: bool = False) -> tuple["Figure", np.ndarray]:
    """A figure with two plots side by side, which share the y-axis if `sharey`. Needs no display."""
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
    """Plot the lengths of sequences, and how many slots of padded batches are padding, shared or computed."""
    drawing, (left, right) = figure()
    lengths = np.asarray(report.lengths)
    left.hist(np.minimum(lengths, np.percentile(lengths, 99.5)), bins=50, color=COMPUTED)
    if report.max_length is not None and report.max_length < lengths.max():
        left.axvline(report.max_length, color="black", linestyle="--", linewidth=1, label="max_length")
        left.legend(frameon=False)
    left.set(xlabel="tokens per sequence", ylabel="sequences", title="Lengths, before truncation")

    batch_size, batches = next(iter(report.batches.items()))
    slots = np.array(sorted((counts.padded, counts.real, counts.computed) for counts in batches))
    padded, real, computed = slots.sum(0)
    shown = slots[:: -(-len(slots) // MOST_BATCHES)]
    labels = {
        f"padding ({1 - real / padded:.0%})": PADDING,
        f"repeats another row ({(real - computed) / padded:.0%})": SHARED,
        f"computed without padding ({computed / padded:.0%})": COMPUTED,
    }
    for height, (label, color) in zip(shown.T, labels.items(), strict=True):  # the lower bars in front
        right.bar(range(len(shown)), height, width=1, color=color, label=label)
    right.legend(frameon=False, loc="upper left", reverse=True)
    right.set(
        xlabel=f"batches of {batch_size}, from small to large",
        ylabel="slots of the padded batch",
        title=f"Slots per batch: {padded / computed:.2f}x fewer computed",
        xticks=[],
        ylim=(0, 1.3 * shown.max()),  # room for the legend
    )
    drawing.savefig(path, dpi=150)


def plot_runs(
    losses: Mapping[str, Sequence[float]], figures: dict[str, dict[str, float]], title: str, path: str | Path
) -> None:
    """
    Plot the losses of two runs, and beside them bars of their `figures`, each with both runs in the order of `losses`,
    relative to the first run.
    """
    drawing, (left, right) = figure()
    (first, second), places = losses, np.arange(len(figures))
    pairs = [[*values.values()] for values in figures.values()]
    for i, name, width, color in ((0, first, 5, "#AAAAAA"), (1, second, 1.5, COMPUTED)):
        left.plot(range(1, 1 + len(losses[name])), losses[name], label=name, linewidth=width, color=color)
        ratios = [pair[i] / pair[0] if pair[0] else 1.0 for pair in pairs]
        bars = right.bar(places + 0.4 * i - 0.2, ratios, width=0.4, color=color, label=name)
        right.bar_label(bars, [f"{pair[i]:,.0f}" if pair[i] >= 10 else f"{pair[i]:.2g}" for pair in pairs])
    right.bar_label(bars, [f"{ratio:.0%}" for ratio in ratios], label_type="center", color="white")
    left.legend(frameon=False)
    left.set(xlabel="step", ylabel="loss", title=f"Loss, {title}")
    right.set(xticks=places, xticklabels=[*figures], ylabel=f"relative to {first}", ylim=(0, 1.2 * max(1.15, *ratios)))
    right.legend(frameon=False, loc="upper right")
    drawing.savefig(path, dpi=150)
