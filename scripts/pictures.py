"""
Draw the pictures of the pages, docs/images/*.svg, from the batches that the package makes of real lengths:

    python scripts/pictures.py            draw them
    python scripts/pictures.py --check    exit with 1 if they are not what would be drawn
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from written import write_or_check

from trl_paddingfree import FlatBatch

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
# Tokens of prompt, chosen and rejected answer, by SmolLM2's tokenizer: the first eight of 1,000 preference pairs drawn
# from UltraFeedback (trl-lib/ultrafeedback_binarized, MIT licence)
PAIRS = (
    (18, 418, 291),
    (365, 75, 595),
    (153, 510, 499),
    (103, 41, 36),
    (43, 659, 471),
    (39, 53, 51),
    (981, 345, 38),
    (96, 29, 22),
)
IN_BATCH = PAIRS[:4]
SHORT = (PAIRS[3], PAIRS[7])
# Kinds of tokens, and how they look: colours that the colour-blind tell apart, on white and on black
PROMPT, CHOSEN, REJECTED, PADDING = KINDS = ("prompt", "chosen answer", "rejected answer", "padding")
COLORS = dict(zip(KINDS, ("#0082CA", "#009E73", "#E66A0A", "#999999"), strict=True))
INK, FAINT = "#767676", 0.35
# Kinds are read off token ids: each token of a pair has an id of its own
SPACING = 10_000


def batch_of(pairs: Sequence[tuple[int, int, int]], prefix_sharing: bool = True) -> FlatBatch:
    """The flat batch of pairs of such lengths, chosen rows first, as in TRL. Only tokens of one prompt are equal."""
    rows = []
    for kind in (CHOSEN, REJECTED):
        for number, (prompt, *answers) in enumerate(pairs):
            length = answers[kind == REJECTED]
            ids = [SPACING * (len(KINDS) * number + KINDS.index(each)) for each in (PROMPT, kind)]
            rows.append([*range(ids[0], ids[0] + prompt), *range(ids[1], ids[1] + length)])
    return FlatBatch.from_rows(rows, [[-100] * len(row) for row in rows], prefix_sharing=prefix_sharing)


def kinds(ids: Iterable[int]) -> list[str]:
    """The kind of each token."""
    return [KINDS[token // SPACING % len(KINDS)] for token in ids]


class Drawing:
    """An SVG picture without a background."""

    def __init__(self, width: float, height: float, title: str):
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        font = 'font-family="system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="14"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="{INK}" role="img">']
        self.parts.append(f"<title>{title}</title>")

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 14, bold: bool = False) -> None:
        """Words at a place."""
        look = f' font-size="{size}"' * (size != 14) + ' font-weight="600"' * bold
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{words}</text>')

    def cells(self, x: float, y: float, row: Sequence[str | None], size: float) -> None:
        """A row of square cells, one per kind; neighbours of one kind are one path. `None` leaves a gap."""
        start = 0
        for end in range(1, len(row) + 1):
            if end < len(row) and row[end] == row[start]:
                continue
            if (kind := row[start]) is not None:
                side = f"{0.86 * size:g}"
                path = "".join(f"M{x + i * size:g} {y:g}h{side}v{side}h-{side}z" for i in range(start, end))
                faint = f' opacity="{FAINT}"' * (kind == PADDING)
                self.parts.append(f'<path fill="{COLORS[kind]}"{faint} d="{path}"/>')
            start = end

    def legend(self, x: float, y: float, names: Sequence[str]) -> float:
        """The kinds with their colours; where the line ends."""
        for name in names:
            self.cells(x, y, [name], 14)
            self.text(x + 18, y + 11, name)
            x += 18 + 8 * len(name) + 14
        return x

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def batch_picture(tokens: int = 16, size: float = 12.5) -> str:
    """One batch of DPO padded, flat, and with shared prompts, in cells of so many `tokens`, each as its middle one."""
    flat, shared = batch_of(IN_BATCH, prefix_sharing=False), batch_of(IN_BATCH)
    width = flat.row_index.size(1)
    columns = -(-width // tokens)
    padded = [[*kinds(row), *[PADDING] * (width - len(row))] for row in flat.to_rows()]
    counts = shared.counts
    drawing = Drawing(columns * size, 394, "One batch of DPO: padded, flat, and with shared prompts")
    end = drawing.legend(0, 2, KINDS)
    drawing.text(end, 13, f"one cell: {tokens} tokens")
    y = 42.0
    for title, said, lines in (
        (
            "TRL, padded",
            f"{len(padded)} rows x {width} = {counts.padded:,} tokens, {counts.padded - counts.real:,} of them padding",
            padded,
        ),
        (
            "without padding",
            f"{counts.real:,} tokens: the same rows, one after another",
            [kinds(flat.input_ids[0].tolist())],
        ),
        (
            "with shared prompts",
            f"{counts.computed:,} tokens: {counts.computed / counts.padded:.0%} of the padded batch, the same loss",
            [kinds(shared.input_ids[0].tolist())],
        ),
    ):
        drawing.text(0, y, title, bold=True)
        y += 9
        for line in lines:
            row = line[tokens // 2 :: tokens]
            for start in range(0, len(row), columns):  # a flat row is longer than the page is wide
                drawing.cells(0, y, row[start : start + columns], size)
                y += size
        drawing.text(0, y + 14, said)
        y += 50
    return drawing.svg()


def attention_picture(tokens: int = 8, size: float = 11, gap: float = 6) -> str:
    """Which keys each query of two pairs sees, one square for so many `tokens` of each."""
    batch = batch_of([tuple(-(-length // tokens) for length in pair) for pair in SHORT])
    segments, names = batch.layout.segments, kinds(batch.input_ids[0].tolist())
    mask = segments.dense_mask()
    of_token = np.repeat(np.arange(len(segments.lengths)), segments.lengths)
    places = np.arange(segments.num_tokens) * size + of_token * gap
    side, left, top = places[-1] + size, 180, 30
    drawing = Drawing(left + side, top + side + 64, "Attention of two preference pairs with shared prompts")
    drawing.legend(left, 2, KINDS[:3])
    said = [f"pair {1 + i % 2}: {'prompt, chosen' if i < 2 else 'rejected'}" for i in range(len(segments.lengths))]
    for i, (start, length) in enumerate(zip(segments.offsets, segments.lengths, strict=False)):
        drawing.text(left - 12, top + places[start] + size * length / 2 + 4, said[i], "end")
        for query in range(start, start + length):
            y = top + places[query]
            for j, (first, number) in enumerate(zip(segments.offsets, segments.lengths, strict=False)):
                keys = range(first, first + number)
                row = [names[key] if mask[query, key] else PADDING if i == j else None for key in keys]
                drawing.cells(left + places[first], y, row, size)
    for i, line in enumerate(
        (
            "Each line is a query, and its coloured squares are keys that it sees.",
            "Faint squares come after the query. Blank ones belong to other rows.",
            f"One square stands for {tokens} x {tokens} tokens.",
        )
    ):
        drawing.text(left, top + side + 20 + 18 * i, line)
    return drawing.svg()


def steps_picture(size: float = 13) -> str:
    """From data to loss in five steps, on the pair of docs/how_it_works.md."""
    batch = batch_of([(3, 3, 2)])
    rows = [kinds(row) for row in batch.to_rows()]
    padded = [[*row, *[PADDING] * (batch.row_index.size(1) - len(row))] for row in rows]
    flat = kinds(batch.input_ids[0].tolist())
    scored = [[None, None, *row[3:]] for row in rows]  # a value for each token of an answer
    prompt = [[PROMPT] * 3, [None] * 4 + [CHOSEN] * 3, [None] * 4 + [REJECTED] * 2]
    steps = (
        ("1. data", "a pair", "TRL", prompt),
        ("2. collator", "rows, and flat", "ours", [*padded, flat]),
        ("3. model", "one flat row", "ours", [flat]),
        ("4. answers", "one float per token", "ours", scored),
        ("5. loss", "and all metrics", "TRL", []),
    )
    width, height, between = 134, 122, 26
    drawing = Drawing(
        5 * width + 4 * between + 4, height + 34, "Five steps: data, collator, model, answers, TRL's loss"
    )
    for i, (title, said, whose, lines) in enumerate(steps):
        x, color = 2 + i * (width + between), INK if whose == "TRL" else COLORS[PROMPT]
        frame = f'width="{width}" height="{height}" rx="8" fill="none" stroke="{color}" stroke-width="1.5"'
        drawing.parts.append(f'<rect x="{x:g}" y="2" {frame}/>')
        drawing.text(x + width / 2, 24, title, "middle", bold=True)
        drawing.text(x + width / 2, 42, said, "middle", 13)
        for j, line in enumerate(lines):
            y = 56 + j * (size + 3) + (8 if whose == "ours" and line is flat and j else 0)
            drawing.cells(x + (width - size * max(map(len, lines))) / 2, y, line, size)
        if not lines:
            drawing.text(x + width / 2, 84, "−log σ(β Δ)", "middle", 15)
        drawing.text(x + width / 2, height + 22, "TRL's own code" if whose == "TRL" else "this package", "middle", 13)
        if i:
            y = 2 + height / 2
            arrow = f"M{x - between + 4:g} {y:g}h{between - 10}m-6 -5l6 5l-6 5"
            drawing.parts.append(f'<path d="{arrow}" fill="none" stroke="{INK}" stroke-width="1.5"/>')
    return drawing.svg()


PICTURES = {"batch.svg": batch_picture, "attention.svg": attention_picture, "steps.svg": steps_picture}


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {IMAGES / name: draw for name, draw in PICTURES.items()}))
