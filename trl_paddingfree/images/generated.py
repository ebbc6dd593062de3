"""Images in GRPO, RLOO and distillation: TRL gives a pass the images of all rows, and it calls the model in chunks."""

from dataclasses import dataclass

import torch

from ..core.flat.batch import Inputs
from .cuts import COUNTS, IMAGE_ARGUMENTS, Cuts, entries_of, equal_images, numbered, row_cuts, spans_of
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
        own = {name: spans_of(range(num_rows), cut[start : self.num_taken]) for name, cut in self.cuts.items()}
        num_pixels = len(places["pixel_values"]) * self.pixels_per_entry
        return RowImages(rules, sources, grids, kept, num_pixels, own)
