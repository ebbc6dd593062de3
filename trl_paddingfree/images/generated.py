"""The images of generated rows: TRL gives them to a whole pass, and flat batches take them row by row."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from ..flat.batch import Inputs
from .rows import RowImages, VisionRules, equal_images

# Arguments of TRL's passes that hold images. Beside them, a pass is told how many each row has, in pieces too
IMAGE_ARGUMENTS = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"),
    *("image_position_ids", "spatial_shapes"),
)
_COUNTS = ("num_images", "num_tiles")


class GeneratedImages:
    """The images of the rows of a pass, of which each call of the model takes the next."""

    def __init__(self, images: Inputs, num_images: list[int], cuts: Mapping[str, list[int]]):
        self.num_images = num_images  # of each row
        self.ends = {name: np.cumsum([0, *cut]) for name, cut in cuts.items()}  # of each row in each argument
        self.firsts = equal_images(images, cuts)  # of each row, the first with equal images
        grids, pixels = images.get("image_grid_thw"), images["pixel_values"]
        self.grids = None if grids is None else grids.cpu()  # of all images, (images, 3) int64, if they have any
        self.pixels_per_entry = pixels.shape[1:].numel()
        self.num_taken = 0  # rows that calls have taken

    @classmethod
    def of(cls, given: Inputs) -> "GeneratedImages | None":
        """Those among the arguments of a pass; `None` if nothing tells whose they are."""
        if given.get("num_images") is None or given.get("pixel_values") is None:
            return None
        images = {name: given[name] for name in IMAGE_ARGUMENTS if given.get(name) is not None}
        counts = {name: given[name] for name in _COUNTS if given.get(name) is not None}
        return cls(images, given["num_images"], row_cuts({**images, **counts}))

    def next(self, num_rows: int, rules: VisionRules) -> RowImages:
        """What the flat batch of the next rows has to know, for a call that is given their images."""
        rows = range(self.num_taken, self.num_taken + num_rows)
        self.num_taken += num_rows
        owners: dict[int, int] = {}  # within these rows, by the first row of all
        for row in rows:
            owners.setdefault(self.firsts[row], row)
        kept, places = {}, dict[str, np.ndarray]()
        for name, ends in self.ends.items():
            spans = [np.arange(*ends[row : row + 2]) for row in owners.values() if self.num_images[row]]
            places[name] = np.concatenate([np.zeros(0, np.int64), *spans])
            if len(places[name]) < ends[rows.stop] - ends[rows.start] or not len(places[name]):
                kept[name] = places[name] - ends[rows.start]  # of the entries that the call is given
        order, grids = list(owners), None
        if rules.counts_grids and self.grids is not None and len(places["image_grid_thw"]):
            grids = self.grids[places["image_grid_thw"]]
        num_pixels = len(places["pixel_values"]) * self.pixels_per_entry
        return RowImages(rules, [order.index(self.firsts[row]) for row in rows], grids, kept, num_pixels)


def split_by_row(batch: Inputs) -> Inputs:
    """A batch of TRL's with lists of what images of each row have, where they may have several entries."""
    # A processor that gives such a mask stacks images by row, which TRL takes for images if there are as many
    is_stacked = batch.get("pixel_attention_mask") is not None and batch.get("spatial_shapes") is None
    return batch if is_stacked else split_pixel_values_by_grid(batch)


def row_cuts(given: Inputs) -> dict[str, list[int]]:
    """How many entries each row has of the arguments with images, as TRL cuts them."""
    cut, num_rows, found = split_by_row(given), len(given["num_images"]), {}
    for name in given.keys() - {*_COUNTS}:
        found[name] = list(map(len, cut[name])) if isinstance(cut[name], list) else [1] * num_rows
        if sum(found[name]) != len(given[name]):
            raise ValueError(
                f"`{name}` has {len(given[name])} entries, and nothing tells to which of the {num_rows} rows they "
                "belong. Set `padding_free=False`."
            )
    return found


def by_prompt(batches: list[Inputs]) -> list[Inputs]:
    """
    The rows of some micro-batches of one width, those of one prompt with equal images together, in micro-batches of the
    same size. As TRL keeps them, these hold tensors and lists of one entry per row, values that all rows have in
    common, and images, which may have several entries per row.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    batches = list(map(split_by_row, batches))
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    images, prompts = GeneratedImages.of(unsplit_pixel_values_by_grid(whole)), whole["prompt_ids"].cpu().numpy()
    firsts = [0] * len(prompts) if images is None else images.firsts
    keys = [(row.tobytes(), first) for row, first in zip(prompts, firsts, strict=True)]
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
