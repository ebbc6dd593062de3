"""Images in GRPO, RLOO and distillation: TRL gives a pass the images of all rows, and it calls the model in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from trl.trainer.utils import split_tensor_dict, unsplit_pixel_values_by_grid

from ..core.flat.batch import Inputs
from .cuts import COUNTS, IMAGE_ARGUMENTS, Cuts, entries_of, equal_images, numbered, row_cuts, split_by_row
from .rows import RowImages, VisionRules


@dataclass
class GeneratedImages:
    """The images of all rows of a pass. Each call of the model takes those of the next rows."""

    num_images: list[int]  # of each row
    cuts: Cuts
    firsts: list[int]  # for each row, the first with equal images
    pixels_per_entry: int
    grids: torch.Tensor | None = None  # of all images, (images, 3) int64, on the CPU, if they have any
    num_taken: int = 0  # rows that calls have taken so far

    @classmethod
    def of(cls, arguments: Inputs) -> "GeneratedImages | None":
        """The images in the arguments of a pass; `None` if there are none, or nothing says how many each row has."""
        given = {name: x for name in (*IMAGE_ARGUMENTS, *COUNTS) if (x := arguments.get(name)) is not None}
        if not {"num_images", "pixel_values"} <= given.keys():
            return None
        cuts, grids = row_cuts(given), given.get("image_grid_thw")
        size = given["pixel_values"].shape[1:].numel()
        return cls(given["num_images"], cuts, equal_images(given, cuts), size, None if grids is None else grids.cpu())

    def next(self, num_rows: int, rules: VisionRules) -> RowImages:
        """The images of the next rows, for the flat batch of the call that gets their entries."""
        start = self.num_taken
        self.num_taken += num_rows
        firsts = self.firsts[start : self.num_taken]
        sources, different = numbered(firsts)
        owners = [row for first in different if self.num_images[row := start + firsts.index(first)]]
        places = {name: torch.from_numpy(entries_of(owners, cut)) for name, cut in self.cuts.items()}
        grids = None if self.grids is None else self.grids[places["image_grid_thw"]]
        kept = tuple((name, entries - sum(self.cuts[name][:start])) for name, entries in places.items())
        return RowImages(rules, sources, grids, kept, len(places["pixel_values"]) * self.pixels_per_entry)


def by_prompt(batches: list[Inputs]) -> list[Inputs]:
    """
    Reorder the rows of micro-batches of one width so that those with the same prompt and equal images come together.
    Micro-batches keep their size and hold, as in TRL, tensors and lists of one entry per row, values that all rows have
    in common, and images, which may have several entries per row.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    size = len(batches[0]["prompt_ids"])
    rows = [row for batch in batches for row in split_tensor_dict(split_by_row(batch), size)]
    whole = _joined(rows)
    images, prompts = GeneratedImages.of(whole), whole["prompt_ids"].cpu().numpy()
    firsts = [0] * len(rows) if images is None else images.firsts
    keys = [(prompt.tobytes(), first) for prompt, first in zip(prompts, firsts, strict=True)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return [_joined([rows[row] for row in order[i : i + size]]) for i in range(0, len(rows), size)]


def _joined(rows: Sequence[Inputs]) -> Inputs:
    joined = dict(rows[0])
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, torch.Tensor) and first.ndim:
            joined[name] = torch.cat(values)
        elif isinstance(first, list):
            joined[name] = [*chain(*values)]
    return unsplit_pixel_values_by_grid(joined)
