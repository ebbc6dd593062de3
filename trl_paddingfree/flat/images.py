"""The images of a flat batch: which feature stands at which placeholder, which images are equal, and image blocks.

A model merges its images itself, once, on the flat row: it writes the next feature of its vision tower at each
placeholder token. Shape legend: see `segments`; in addition
    F = features of the images, in the order in which the tower gives them, row by row
    I = placeholders on the flat axis; several of them may want one feature, where rows have copies of an image
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .transfer import HasTensors

# The rows by which models count positions of image tokens
COUNTED_ROWS = ("input_ids", "attention_mask", "mm_token_type_ids")


@dataclass(frozen=True)
class VisionRules:
    """What a collator has to know of a vision-language model."""

    token_id: int  # the placeholder
    block_row: str = ""  # the processor's row that tells which tokens see one another in both directions, if some do
    block_types: tuple[int, ...] = ()  # the values that mark them
    longest_block: int | None = None  # beyond which a block sees more than a layer's window, and ours do not
    counts_grids: bool = False  # whether positions of image tokens are counted by the images' grids


@dataclass(frozen=True)
class RowImages:
    """
    What is known of the images of some rows before these are flattened.

    Rows come in `copies` of equal images: chosen and rejected rows have the same ones, which are there once. `grids`,
    on the CPU, are what a model counts positions of image tokens by: rows of shape `(R, L)` and the grids of the
    images; empty, if positions are those of text.

    >>> images, rows = RowImages(9, groups=[0, 1]), [np.array([1, 9, 9, 2]), np.array([1, 9, 9, 3])]
    >>> [row.tolist() for row in images.identities(rows)], [row.tolist() for row in images.features(rows)]
    ([[1, -1, -2, 2], [1, -5, -6, 3]], [[-1, 0, 1, -1], [-1, 2, 3, -1]])
    """

    token_id: int  # the placeholder
    groups: Sequence[int]  # of each of the `R` rows, from 0: one for rows of equal images, and for no others
    copies: int = 1
    blocks: np.ndarray | None = None  # (R, L) bool: tokens that see all tokens of their run, also those that follow
    grids: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_pixels: int = 0  # how many numbers the images have, as the vision tower gets them

    def _numbered(self, rows: Sequence[np.ndarray], firsts: Sequence[int]) -> list[np.ndarray]:
        """The placeholders of each row counted from its entry in `firsts`, and -1 elsewhere."""
        found = [row == self.token_id for row in rows]
        return [np.where(x, first + np.cumsum(x) - 1, -1) for x, first in zip(found, firsts, strict=True)]

    def identities(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`R` int64 arrays by which rows are compared: the tokens, and a negative number for each image's tokens."""
        longest = max(map(len, rows), default=0)
        numbered = self._numbered(rows, [group * longest for group in self.groups])
        return [np.where(number < 0, row, -1 - number) for row, number in zip(rows, numbered, strict=True)]

    def features(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`R` int64 arrays: the feature that each placeholder wants, and -1 elsewhere. Refuses copies that differ."""
        counts, size = [int((row == self.token_id).sum()) for row in rows], len(rows) // self.copies
        if any(counts[:size] != counts[first : first + size] for first in range(0, len(rows), size or 1)):
            raise ValueError(
                f"Image features and image tokens do not match, tokens of the rows: {counts}. Copies of a prompt must "
                "have the same placeholders."
            )
        return self._numbered(rows, np.cumsum([0, *counts[:size]])[:-1].tolist() * self.copies)


@dataclass(frozen=True)
class FlatImages(HasTensors):
    """The images of a flat batch. `copies`, `grids` and `num_pixels` are those of [`RowImages`]."""

    num_features: int  # `F`, by the placeholders of one copy of the rows: the vision tower must give as many
    feature_index: torch.Tensor | None  # (I,) int64: of each placeholder, in flat order; `None` if that is their own
    copies: int
    grids: Mapping[str, torch.Tensor]  # they stay on the CPU, where positions are counted
    num_pixels: int = 0

    @classmethod
    def from_rows(cls, images: RowImages, rows: Sequence[np.ndarray], paths: Sequence[np.ndarray], size: int):
        """Of a batch of `size` flat tokens, from its rows and the flat positions of their tokens."""
        wanted, features = np.full(size, -1), images.features(rows)
        for feature, path in reversed([*zip(features, paths, strict=True)]):  # of equal images, the first
            wanted[path] = feature
        index, total = wanted[wanted >= 0], max(int(feature.max(initial=-1)) + 1 for feature in features)
        in_order = len(index) == total and bool((index == np.arange(total)).all())
        feature_index = None if in_order else torch.from_numpy(index)
        return cls(total, feature_index, images.copies, images.grids, images.num_pixels)


def flat_blocks(blocks: np.ndarray, paths: Sequence[np.ndarray], size: int) -> np.ndarray:
    """`(size,)` int64: the image block of each flat token, or -1, by runs in `blocks` of shape `(R, L)`."""
    flat = np.full(size, -1)
    for row, path in zip(blocks, paths, strict=True):
        inside = row[: len(path)]
        begins = inside & ~np.concatenate([[False], inside[:-1]])
        firsts = np.maximum.accumulate(np.where(begins, np.arange(len(path)), 0))
        flat[path[inside]] = path[firsts[inside]]  # the first token's place: rows that share a block name it alike
    return flat
