"""Collators of images and text: TRL's rows, each image processed once, and beside them the flat batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from .examples import images_of
from .rows import RowImages, VisionRules, equal_images, sources_of

# What a processor and TRL's collators give row by row; all else belongs to images
_TYPES = ("token_type_ids", "mm_token_type_ids")
_MASKED = ("input_ids", "attention_mask", "completion_mask", *_TYPES)
_ROWS = (*_MASKED, "labels", "label", *(f"KL_{name}" for name in _MASKED))
# Under which name `torch_call` hands on the examples that it was called with
_EXAMPLES = "examples"
_OTHER_MEDIA = ("pixel_values_videos", "input_features", "audio_values", "input_values")


class ImagesOnce:
    """A processor to which TRL gives each prompt twice, for chosen and rejected row: it doubles rows, not images."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["processor"], name)  # what else TRL's collator asks of a processor

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
    rules: VisionRules | None = None  # what the model wants to know; needed if `padding_free`

    def rows(self, examples: list[Example]) -> Inputs:
        """TRL's rows, with one copy of what belongs to images."""
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
        """What the flat batch has to know of the images of examples with these `sources`; `None` if rows have none."""
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
    """The rows of a batch with images, and what belongs to their images, once for those that are equal."""

    collator: FlatVisionCollator
    examples: Sequence[Example] = ()  # processed again, where images of some cannot be cut out of those of all
    sources: Sequence[int] = ()  # of each example, whose images it has: numbered in the order of the examples

    @classmethod
    def of(cls, collator: FlatVisionCollator, rows: Inputs, examples: Sequence[Example]) -> "CollatedImageRows":
        """Those of some examples, of TRL's rows."""
        found = cls(collator, rows, len(examples), examples, range(len(examples)))
        images, cuts = found.images(), found._cuts()
        if not images or cuts is None or not all(isinstance(x, torch.Tensor) for x in images.values()):
            return found
        sources, owners = sources_of(equal_images(images, cuts))
        return replace(found, rows={**rows, **taken(images, cuts, owners)}, sources=sources)

    def _cuts(self) -> dict[str, list[int]] | None:
        """How many entries of what belongs to images each source has, by name; `None` if nothing tells."""
        if not self.images():
            return {}
        assert self.collator.rules is not None
        tokens = (self.rows["input_ids"] == self.collator.rules.token_id).sum(1).tolist()
        of_examples = zip(map(len, map(images_of, self.examples)), tokens, strict=False)
        of_sources = dict(zip(self.sources, of_examples, strict=True)).values()
        return image_cuts(self.images(), *map(list, zip(*of_sources, strict=True)))

    def take(self, examples: Sequence[int]) -> "CollatedImageRows":
        chosen, cuts, numbers = [self.examples[i] for i in examples], self._cuts(), self.row_numbers(examples)
        rows = {name: x[numbers] for name, x in self.rows.items() if name in _ROWS}
        if cuts is None:  # of rows, those that were collated stay: a subclass may have edited them
            again, sources = self.collator.rows(chosen), [*range(len(chosen))]
            images = of_images(again)
        else:
            sources, owners = sources_of([self.sources[i] for i in examples])
            images = taken(self.images(), cuts, owners) if any(map(images_of, chosen)) else {}
        return CollatedImageRows(self.collator, {**rows, **images}, len(chosen), chosen, sources)

    def with_flat(self, reach: int | None = None) -> Inputs:
        batch = self.collator.flatten(self.rows, reach, self.collator.images(self.rows, self.sources))
        # A plain dict with the rows first: the data loader asks the first value for its length, and moves the others
        return {"input_ids": self.rows["input_ids"], **self.rows, "flat_batch": batch}

    def images(self) -> Inputs:
        return of_images(self.rows)


def of_images(rows: Inputs) -> Inputs:
    """What of a processor's output, or of a batch, belongs to images."""
    return {name: value for name, value in rows.items() if name not in _ROWS}


def image_cuts(images: Inputs, counts: Sequence[int], tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """
    How many entries of what belongs to images each example has, by name, if each has so many images and placeholders.

    Processors stack it by example, by image, by patch of each image's grid, or by tile of equally many placeholders.
    Where the lengths do not tell which, the images have to be processed again: `None`.
    """
    if not any(counts):  # images that were not found in the examples
        return None
    ends = np.cumsum([0, *counts]).tolist()
    cuts = [list(counts), [min(count, 1) for count in counts]]
    # Images of four dimensions may be tiles, of which there may be as many as examples
    pixels, grids = images.get("pixel_values"), images.get("image_grid_thw")
    if 0 not in counts or not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
        cuts.append([1] * len(counts))
    if grids is not None and len(grids) == ends[-1]:
        patches = grids.prod(-1).tolist()
        cuts.append([sum(patches[a:b]) for a, b in zip(ends, ends[1:], strict=False)])
    found: dict[str, list[int]] = {}
    for name, value in images.items():
        size, total = len(value), sum(tokens)
        sizes = {tuple(cut) for cut in cuts if sum(cut) == size}
        if not sizes and total and not any(count * size % total for count in tokens):
            sizes = {tuple(count * size // total for count in tokens)}
        if len(sizes) != 1:
            return None
        found[name] = [*sizes.pop()]
    return found


def taken(images: Inputs, cuts: dict[str, list[int]], owners: Sequence[int]) -> Inputs:
    """What belongs to the images of some `owners` of these, of which each has as many entries as `cuts` says."""
    found: Inputs = {}
    for name, value in images.items():
        ends = np.cumsum([0, *cuts[name]]).tolist()
        index = [k for owner in owners for k in range(ends[owner], ends[owner + 1])]
        found[name] = value[index] if isinstance(value, torch.Tensor) else [value[k] for k in index]
    return found
