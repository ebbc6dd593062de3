"""Charts, as PNG files. They need matplotlib (`pip install "trl-paddingfree[plot]"`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .data.savings import WasteReport

# Colour-blind safe, from the Okabe-Ito palette
COMPUTED, SHARED, PADDING = "#0072B2", "#56B4E9", "#D9D9D9"
PADDED_RUN, FLAT_RUN = "#999999", "#0072B2"
# More bars than this cannot be told apart
MOST_BATCHES = 64


def figure(columns: int) -> tuple[Any, Any]:
    """
    A figure with one row of plots, drawn without a display.

    Raises:
        `ImportError`: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'Charts need matplotlib, which is not installed: `pip install "trl-paddingfree[plot]"`.'
        ) from error
    drawing = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    axes = drawing.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return drawing, axes


def plot_waste(report: "WasteReport", path: str | Path) -> None:
    """
    Draw the lengths of the sequences, and what fills the slots of each padded batch.

    Args:
        report ([`~trl_paddingfree.data.savings.WasteReport`]):
            What to draw.
        path (`str` or `Path`):
            PNG file to write.
    """
    drawing, (left, right) = figure(2)
    lengths = np.asarray(report.lengths)
    left.hist(np.minimum(lengths, np.percentile(lengths, 99.5)), bins=50, color=COMPUTED)
    if report.max_length is not None and report.max_length < lengths.max():
        left.axvline(report.max_length, color="black", linestyle="--", linewidth=1, label="max_length")
        left.legend(frameon=False)
    left.set(xlabel="tokens per sequence", ylabel="sequences", title="Lengths, before truncation")

    waste = report.waste[0]
    batches = sorted(waste.batches, key=lambda counts: counts.padded)
    every = -(-len(batches) // MOST_BATCHES)
    batches = batches[::every]
    places = np.arange(len(batches))
    computed, real, padded, *_ = np.array([counts.as_tuple() for counts in batches]).T
    share = f"{1 - waste.padding - waste.total.computed / waste.total.padded:.0%}"
    for bottom, top, color, label in (
        (0, computed, COMPUTED, f"computed without padding ({waste.total.computed / waste.total.padded:.0%})"),
        (computed, real, SHARED, f"in another row already ({share})"),
        (real, padded, PADDING, f"padding ({waste.padding:.0%})"),
    ):
        right.bar(places, top - bottom, bottom=bottom, width=1, color=color, label=label)
    right.legend(frameon=False, loc="upper left")
    right.set(
        xlabel=f"batches of {waste.batch_size}, from small to large",
        ylabel="slots of the padded batch",
        title=f"Slots per batch: {waste.sharing_speed_up:.2f}x fewer computed",
        xticks=[],
        ylim=(0, 1.3 * padded.max()),  # room for the legend
    )
    drawing.savefig(path, dpi=150)


def plot_runs(
    losses: dict[str, Sequence[float]], figures: dict[str, dict[str, float]], title: str, path: str | Path
) -> None:
    """
    Draw the losses of two runs over each other, and their figures side by side.

    Args:
        losses (`dict[str, Sequence[float]]`):
            For each run, by name, the loss of every step. The first run is the one to compare with.
        figures (`dict[str, dict[str, float]]`):
            For each figure, by name, its value for each run.
        title (`str`):
            What was run.
        path (`str` or `Path`):
            PNG file to write.
    """
    drawing, (left, right) = figure(2)
    styles = [{"linewidth": 5, "color": "#CCCCCC"}, {"linewidth": 1.5, "color": FLAT_RUN}]
    for (name, values), style in zip(losses.items(), styles, strict=True):
        left.plot(np.arange(1, len(values) + 1), values, label=name, **style)
    left.legend(frameon=False)
    left.set(xlabel="step", ylabel="loss", title=f"Loss, {title}")
    first, second = losses
    places = np.arange(len(figures))
    ratios = [values[second] / values[first] if values[first] else 1.0 for values in figures.values()]
    right.bar(places - 0.2, np.ones(len(places)), width=0.4, color=PADDED_RUN, label=first)
    bars = right.bar(places + 0.2, ratios, width=0.4, color=FLAT_RUN, label=second)
    right.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios])
    right.set(xticks=places, xticklabels=list(figures), ylabel=f"relative to {first}", ylim=(0, 1.35))
    right.legend(frameon=False, loc="upper right")
    drawing.savefig(path, dpi=150)
