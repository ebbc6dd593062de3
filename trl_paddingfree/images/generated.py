"""Images in GRPO, RLOO and distillation: TRL gives those of all rows to a pass, which calls the model in chunks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from ..flat.batch import Inputs
from .rows import RowImages, VisionRules, equal_images, sources_of

# Arguments of TRL's passes that hold images, and those that say how many images, or tiles of them, each row has
IMAGE_ARGUMENTS = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"),
    *("image_position_ids", "spatial_shapes"),
)
_COUNTS = ("num_images", "num_tiles")


class GeneratedImages:
    """The images of all rows of a pass. Each call of the model takes those of the next rows."""

    def __init__(self, images: Inputs, num_images: list[int], cuts: Mapping[str, list[int]]):
        self.num_images = num_images  # of each row
        self.ends = {name: np.cumsum([0, *cut]) for name, cut in cuts.items()}  # of each row in each argument
        self.firsts = equal_images(images, cuts)  # of each row, the first with equal images
        grids, pixels = images.get("image_grid_thw"), images["pixel_values"]
        self.grids = None if grids is None else grids.cpu()  # of all images, (images, 3) int64, if they have any
        self.pixels_per_entry = pixels.shape[1:].numel()
        self.num_taken = 0  # rows that calls have taken

    @classmethod
    def of(cls, arguments: Inputs) -> "GeneratedImages | None":
        """Those among the arguments of a pass; `None` if there are none, or nothing says which row has how many."""
        there = {name: x for name in (*IMAGE_ARGUMENTS, *_COUNTS) if (x := arguments.get(name)) is not None}
        if "num_images" not in there or "pixel_values" not in there:
            return None
        images = {name: x for name, x in there.items() if name not in _COUNTS}
        return cls(images, there["num_images"], row_cuts(there))

    def next(self, num_rows: int, rules: VisionRules) -> RowImages:
        """The images of the next rows, for the flat batch of a call that gets the entries of these rows."""
        rows = range(self.num_taken, self.num_taken + num_rows)
        self.num_taken += num_rows
        sources, firsts = sources_of([self.firsts[row] for row in rows])
        owners = [rows[sources.index(source)] for source in range(len(firsts))]  # the first of these rows with each
        places: dict[str, np.ndarray] = {}  # of the owners' entries, among those of the pass
        kept: dict[str, np.ndarray] = {}
        for name, ends in self.ends.items():
            spans = [np.arange(*ends[row : row + 2]) for row in owners if self.num_images[row]]
            places[name] = np.concatenate([np.zeros(0, np.int64), *spans])
            if len(places[name]) < ends[rows.stop] - ends[rows.start] or not len(places[name]):
                kept[name] = places[name] - ends[rows.start]
        grids = None
        if rules.counts_grids and self.grids is not None and len(places["image_grid_thw"]):
            grids = self.grids[places["image_grid_thw"]]
        return RowImages(rules, sources, grids, kept, len(places["pixel_values"]) * self.pixels_per_entry)


def split_by_row(batch: Inputs) -> Inputs:
    """TRL's split of a batch: arguments with several entries per row become lists, with those of each row together."""
    # With such a mask, each row has one entry, also if there are as many rows as images, and TRL would split by images
    is_stacked = batch.get("pixel_attention_mask") is not None and batch.get("spatial_shapes") is None
    return batch if is_stacked else split_pixel_values_by_grid(batch)


def row_cuts(arguments: Inputs) -> dict[str, list[int]]:
    """How many entries each row has of the arguments with images, as TRL splits them."""
    num_rows = len(arguments["num_images"])
    cuts = {}
    for name, value in split_by_row(arguments).items():
        if name in _COUNTS:
            continue
        cuts[name] = list(map(len, value)) if isinstance(value, list) else [1] * num_rows
        if sum(cuts[name]) != len(arguments[name]):
            raise ValueError(
                f"`{name}` has {len(arguments[name])} entries, and nothing tells to which of the {num_rows} rows they "
                "belong. Set `padding_free=False`."
            )
    return cuts


def by_prompt(batches: list[Inputs]) -> list[Inputs]:
    """
    The rows of micro-batches of one width in another order, so that rows with the same prompt and equal images come
    together, in micro-batches of the same size. As TRL keeps them, these hold tensors and lists of one entry per row,
    values that all rows have in common, and images, which may have several entries per row.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]
    """
    batches = list(map(split_by_row, batches))
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    images = GeneratedImages.of(unsplit_pixel_values_by_grid(whole))
    prompts = whole["prompt_ids"].cpu().numpy()
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
