"""Collators of images and text: TRL's rows and the flat batch of them, with each image processed once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..data.collate import FlatCollator, FlatMismatchedCollator
from ..data.lengths import Example
from ..data.rows import CollatedRows
from ..flat.batch import Inputs
from ..model.architecture import TYPE_ROWS
from .examples import images_of
from .rows import RowImages, VisionRules, equal_images, sources_of

# What processors and TRL's collators return with one entry per row. Everything else belongs to images
_MASKED = ("input_ids", "attention_mask", "completion_mask", *TYPE_ROWS)
_ROWS = (*_MASKED, "labels", "label", *(f"KL_{name}" for name in _MASKED))
# The name of the examples in what `torch_call` returns, for `collated_rows`
_EXAMPLES = "examples"
_OTHER_MEDIA = ("pixel_values_videos", "input_features", "audio_values", "input_values")


class ImagesOnce:
    """A processor in TRL's collator of pairs, which gives it each prompt twice: it doubles rows, and not images."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["processor"], name)  # TRL's collator reads its attributes

    def __call__(self, text: list[str], **kwargs: Any) -> BatchFeature:
        if "images" not in kwargs:  # completions
            return self.processor(text=text, **kwargs)
        half = len(text) // 2
        images = kwargs.pop("images")
        output = self.processor(text=text[:half], images=None if images is None else images[:half], **kwargs)
        for name in _ROWS:
            if name in output:
                output[name] = torch.cat([output[name]] * 2)
        return output


@dataclass
class FlatVisionCollator(FlatCollator):
    """What the collators of this module add to TRL's: with `padding_free`, rows come with a `"flat_batch"`."""

    padded_by: ClassVar[tuple[str, ...]] = ()
    rules: VisionRules | None = None  # how the model reads images; needed if `padding_free`

    def rows(self, examples: list[Example]) -> Inputs:
        """TRL's rows, with each image once."""
        return dict(self.padded(examples))

    def padded(self, examples: list[Example]) -> Inputs:
        """TRL's batch."""
        # TRL's collators change examples
        return super(FlatCollator, self).torch_call(list(map(dict, examples)))  # type: ignore[misc]

    def torch_call(self, examples: list[Example]) -> Inputs:
        if not self.padding_free:
            return self.padded(examples)
        # A subclass may have changed which examples there are, and in which order
        return {**self.rows(examples), _EXAMPLES: examples}

    def collated_rows(self, rows: Inputs, features: list[Example]) -> "CollatedImageRows":
        if found := [name for name in _OTHER_MEDIA if rows.get(name) is not None]:
            raise ValueError(
                f"The processor gave `{found[0]}`: videos and audio cannot be trained on without padding, images can. "
                "Leave them out of the messages, or set `padding_free=False`."
            )
        examples = rows.pop(_EXAMPLES, features)
        return CollatedImageRows.of(self, rows, examples)

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return rows["labels"] if "labels" in rows else super().row_labels(rows)

    def images(self, rows: Inputs, sources: Sequence[int]) -> RowImages | None:
        """The images of rows, whose examples have these `sources`; `None` if there are none."""
        rules = self.rules
        assert rules is not None
        if not (rows["input_ids"] == rules.token_id).any():
            return None
        of_rows = [*sources] * (len(rows["input_ids"]) // len(sources))
        grids = rows.get("image_grid_thw") if rules.counts_grids else None
        if rules.counts_grids and (grids is None or "mm_token_type_ids" not in rows):
            raise ValueError(
                "The model counts positions of image tokens by what this package does not know: its processor gives no "
                "`mm_token_type_ids` with `image_grid_thw`. Set `padding_free=False`."
            )
        num_pixels = sum(image.numel() for image in rows.get("pixel_values", ()))
        return RowImages(rules, of_rows, grids, num_pixels=num_pixels)


@dataclass
class VisionPreferenceCollator(FlatVisionCollator, DataCollatorForVisionPreference):
    """Collator of preference pairs with images: TRL's. With `padding_free`, each image is there once."""

    def rows(self, examples: list[Example]) -> Inputs:
        return dict(replace(self, processor=ImagesOnce(self.processor)).padded(examples))  # type: ignore[arg-type]


@dataclass
class VisionLanguageModelingCollator(FlatVisionCollator, DataCollatorForVisionLanguageModeling):
    """Collator of instructions with images: TRL's."""

    prefix_sharing: bool = False


@dataclass
class VisionUnpairedCollator(FlatMismatchedCollator, FlatVisionCollator, DataCollatorForVisionUnpairedPreference):
    """Collator of completions with images that are desirable or not: TRL's."""


@dataclass(frozen=True)
class CollatedImageRows(CollatedRows):
    """The rows of a batch with images, and what belongs to the images, of which equal ones are there once."""

    collator: FlatVisionCollator
    examples: Sequence[Example] = ()  # processed again if images of some cannot be cut out of those of all
    sources: Sequence[int] = ()  # the source of each example: those with equal images have one, numbered in order

    @classmethod
    def of(cls, collator: FlatVisionCollator, rows: Inputs, examples: Sequence[Example]) -> "CollatedImageRows":
        """Makes them of TRL's rows and their examples."""
        whole = cls(collator, rows, len(examples), examples, range(len(examples)))
        images, cuts = of_images(rows), whole._cuts()
        if not images or cuts is None or not all(isinstance(x, torch.Tensor) for x in images.values()):
            return whole
        sources, owners = sources_of(equal_images(images, cuts))
        return replace(whole, rows={**rows, **taken(images, cuts, owners)}, sources=sources)

    def _cuts(self) -> dict[str, list[int]] | None:
        """How many entries each source has of what belongs to images, by name; `None` if the lengths do not tell."""
        images = of_images(self.rows)
        if not images:
            return {}
        assert self.collator.rules is not None
        tokens = (self.rows["input_ids"] == self.collator.rules.token_id).sum(1).tolist()
        of_examples = zip(map(len, map(images_of, self.examples)), tokens, strict=False)
        of_sources = dict(zip(self.sources, of_examples, strict=True)).values()
        return image_cuts(images, *map(list, zip(*of_sources, strict=True)))

    def take(self, examples: Sequence[int]) -> "CollatedImageRows":
        chosen = [self.examples[i] for i in examples]
        numbers = self.row_numbers(examples)
        rows = {name: x[numbers] for name, x in self.rows.items() if name in _ROWS}
        if (cuts := self._cuts()) is None:  # only images are taken from this: a subclass may have edited the rows
            images, sources = of_images(self.collator.rows(chosen)), [*range(len(chosen))]
        else:
            sources, owners = sources_of([self.sources[i] for i in examples])
            images = taken(of_images(self.rows), cuts, owners) if any(map(images_of, chosen)) else {}
        return CollatedImageRows(self.collator, {**rows, **images}, len(chosen), chosen, sources)

    def with_flat(self, reach: int | None = None) -> Inputs:
        batch = self.collator.flatten(self.rows, reach, self.collator.images(self.rows, self.sources))
        # A plain dict with the rows first: the data loader asks the first value for its length, and moves the others
        return {"input_ids": self.rows["input_ids"], **self.rows, "flat_batch": batch}


def of_images(rows: Inputs) -> Inputs:
    """The entries of a batch, or of a processor's output, that belong to images."""
    return {name: value for name, value in rows.items() if name not in _ROWS}


def image_cuts(images: Inputs, counts: Sequence[int], tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """
    How many entries each example has of what belongs to images, by name. Each has so many images (`counts`) and
    placeholders (`tokens`).

    Processors stack images by example, by image, by patch of each image's grid, or by tile of equally many
    placeholders. If the lengths do not tell which, the result is `None`, and the images have to be processed again.
    """
    if not any(counts):  # the images stand where `images_of` does not look
        return None
    ends = np.cumsum([0, *counts]).tolist()
    candidates = [list(counts), [min(count, 1) for count in counts]]
    # Pixels of four dimensions may be tiles, and these as many as examples by chance, if some have no image
    pixels, grids = images.get("pixel_values"), images.get("image_grid_thw")
    if 0 not in counts or not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
        candidates.append([1] * len(counts))
    if grids is not None and len(grids) == ends[-1]:
        patches = grids.prod(-1).tolist()
        candidates.append([sum(patches[a:b]) for a, b in pairwise(ends)])
    cuts: dict[str, list[int]] = {}
    total = sum(tokens)
    for name, value in images.items():
        size = len(value)
        possible = {tuple(cut) for cut in candidates if sum(cut) == size}
        if not possible and total and not any(count * size % total for count in tokens):
            possible = {tuple(count * size // total for count in tokens)}
        if len(possible) != 1:
            return None
        cuts[name] = [*possible.pop()]
    return cuts


def taken(images: Inputs, cuts: dict[str, list[int]], owners: Sequence[int]) -> Inputs:
    """The entries of some `owners`, one after another, where `cuts` says how many entries each owner has."""
    entries: Inputs = {}
    for name, value in images.items():
        ends = np.cumsum([0, *cuts[name]]).tolist()
        index = [k for owner in owners for k in range(ends[owner], ends[owner + 1])]
        entries[name] = value[index] if isinstance(value, torch.Tensor) else [value[k] for k in index]
    return entries
