"""Images in GRPO, RLOO and distillation: TRL gives those of all rows to a pass, which calls the model in chunks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import split_tensor_dict, unsplit_pixel_values_by_grid

from ..flat.batch import Inputs
from .cuts import COUNTS, IMAGE_ARGUMENTS, entries_of, equal_images, row_cuts, sources_of, split_by_row
from .rows import RowImages, VisionRules


@dataclass
class GeneratedImages:
    """The images of all rows of a pass. Each call of the model takes those of the next rows."""

    num_images: list[int]  # of each row
    cuts: dict[str, list[int]]  # how many entries each row has in each argument
    firsts: list[int]  # of each row, the first with equal images
    pixels_per_entry: int
    grids: torch.Tensor | None = None  # of all images, (images, 3) int64, on the CPU, if they have any
    num_taken: int = 0  # rows that calls have taken

    @classmethod
    def of(cls, arguments: Inputs) -> "GeneratedImages | None":
        """Those among the arguments of a pass; `None` if there are none, or nothing says which row has how many."""
        given = {name: x for name in (*IMAGE_ARGUMENTS, *COUNTS) if (x := arguments.get(name)) is not None}
        if not {"num_images", "pixel_values"} <= given.keys():
            return None
        cuts, grids = row_cuts(given), given.get("image_grid_thw")
        size = given["pixel_values"].shape[1:].numel()
        return cls(given["num_images"], cuts, equal_images(given, cuts), size, None if grids is None else grids.cpu())

    def next(self, num_rows: int, rules: VisionRules) -> RowImages:
        """The images of the next rows, for the flat batch of a call that gets the entries of these rows."""
        rows = range(self.num_taken, self.num_taken + num_rows)
        self.num_taken += num_rows
        sources, owners = sources_of([self.firsts[row] for row in rows])
        owners = [rows[owner] for owner in owners if self.num_images[rows[owner]]]
        places = {name: entries_of(owners, cut) for name, cut in self.cuts.items()}
        kept: dict[str, np.ndarray] = {}
        for name, entries in places.items():
            cut = self.cuts[name]
            if len(entries) < sum(cut[row] for row in rows) or not len(entries):
                kept[name] = entries - sum(cut[: rows.start])
        has_grids = rules.patches and self.grids is not None and len(places["image_grid_thw"])
        grids = self.grids[places["image_grid_thw"]] if has_grids else None  # type: ignore[index]
        return RowImages(rules, sources, grids, kept, len(places["pixel_values"]) * self.pixels_per_entry)


def by_prompt(batches: list[Inputs]) -> list[Inputs]:
    """
    The rows of micro-batches of one width in another order, so that rows with the same prompt and equal images come
    together, in micro-batches of the same size. As TRL keeps them, these hold tensors and lists of one entry per row,
    values that all rows have in common, and images, which may have several entries per row.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    split = list(map(split_by_row, batches))
    whole = {name: _joined([batch[name] for batch in split]) for name in split[0]}
    images = GeneratedImages.of(unsplit_pixel_values_by_grid(whole))
    prompts = [row.tobytes() for row in whole["prompt_ids"].cpu().numpy()]
    keys = [*zip(prompts, [0] * len(prompts) if images is None else images.firsts, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)

    def ordered(value):
        if isinstance(value, torch.Tensor) and value.ndim:
            return value[order]
        return [value[row] for row in order] if isinstance(value, list) else value

    parts: Any = split_tensor_dict({name: ordered(value) for name, value in whole.items()}, len(batches))
    return list(map(unsplit_pixel_values_by_grid, parts))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].ndim:
        return torch.cat(values)
    return [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]
