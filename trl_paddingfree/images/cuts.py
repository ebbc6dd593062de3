"""Which entries of image arguments belong to which row, and which rows have equal images."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from trl.trainer.utils import split_pixel_values_by_grid

from ..core.flat.batch import Inputs

# Arguments of TRL's passes that hold images, and those that say how many images, or tiles of images, each row has
IMAGE_ARGUMENTS = (
    "pixel_values",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_sizes",
    "image_position_ids",
    "spatial_shapes",
)
COUNTS = ("num_images", "num_tiles")
# What LLaVA-OneVision's processor adds: a number for each row that has images
PER_ROW = "batch_num_images"
# How many entries each row, or each example, has in each argument with images
Cuts = Mapping[str, Sequence[int]]


def split_by_row(batch: Inputs) -> Inputs:
    """Split a batch as TRL does: arguments with several entries per row become lists with one tensor per row."""
    # With such a mask, each row has one entry. If there are as many rows as images, TRL would split by images
    is_stacked = batch.get("pixel_attention_mask") is not None and batch.get("spatial_shapes") is None
    return batch if is_stacked else split_pixel_values_by_grid(batch)


def row_cuts(arguments: Inputs) -> Cuts:
    """How many entries each row has in each image argument, as TRL splits them by `num_images`."""
    num_rows, cuts = len(arguments["num_images"]), {}
    for name, value in split_by_row(arguments).items():
        if name in COUNTS:
            continue
        cuts[name] = list(map(len, value)) if isinstance(value, list) else [1] * num_rows
        if name == PER_ROW:
            cuts[name] = [min(number, 1) for number in arguments["num_images"]]
        if sum(cuts[name]) != len(arguments[name]):
            raise ValueError(
                f"`{name}` has {len(arguments[name])} entries, and it is not known to which of the {num_rows} rows "
                "they belong. Set `padding_free=False`."
            )
    return cuts


def entries_of(rows: Sequence[int], cut: Sequence[int]) -> np.ndarray:
    """
    The indices of the entries of some rows, one row after another, where `cut` says how many entries each row has.

    >>> entries_of([2, 0], [2, 1, 3]).tolist()
    [3, 4, 5, 0, 1]
    """
    of_rows = np.split(np.arange(sum(cut)), np.cumsum(cut))
    return np.concatenate([of_rows[row] for row in (*rows, -1)])  # after the last row, nothing is left


def spans_of(rows: Iterable[int], cut: Sequence[int]) -> list[slice]:
    """
    Where the entries of each of some rows are, where `cut` says how many entries each row has.

    >>> spans_of([2, 0], [2, 1, 3])
    [slice(3, 6, None), slice(0, 2, None)]
    """
    ends = [0, *accumulate(cut)]
    return [slice(ends[row], ends[row + 1]) for row in rows]


def numbered(keys: Sequence[int]) -> tuple[list[int], list[int]]:
    """
    Number keys in order of first appearance: the number of each key, and the distinct keys.

    >>> numbered([7, 3, 7, 5])
    ([0, 1, 0, 2], [7, 3, 5])
    """
    different = [*dict.fromkeys(keys)]
    return list(map(different.index, keys)), different


def equal_images(arguments: Mapping[str, torch.Tensor], cuts: Cuts) -> list[int]:
    """
    For each row, the first row with equal images, which may be itself. Synchronizes with the device, once more for each
    row whose images look like those of another.

    Args:
        arguments (`Mapping[str, torch.Tensor]`):
            Arguments of the model with the images of all rows, row by row along dimension 0.
        cuts (`Mapping[str, Sequence[int]]`):
            How many entries each row has in each of these arguments.

    >>> pixels = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])
    >>> equal_images({"pixel_values": pixels}, {"pixel_values": [1, 1, 1]})
    [0, 1, 0]
    """
    rows = [*zip(*(arguments[name].split(list(cut)) for name, cut in cuts.items()), strict=True)]
    of_bytes = [torch.stack([x.contiguous().view(torch.uint8).sum() for x in row]) for row in rows]
    sums = torch.stack(of_bytes).tolist()  # one copy from the device
    firsts = map(sums.index, sums)
    return [first if all(map(torch.equal, rows[row], rows[first])) else row for row, first in enumerate(firsts)]
