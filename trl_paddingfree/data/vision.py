"""Collators of images and text: TRL's rows, each image processed once, and beside them the flat batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..flat.batch import Inputs
from ..flat.images import COUNTED_ROWS, RowImages, VisionRules
from .collate import FlatCollator
from .images import images_key, images_of
from .lengths import Example
from .rows import CollatedRows

# What a processor and TRL's collators give row by row; all else belongs to images
_ROWS = ("input_ids", "attention_mask", "completion_mask", "labels", "token_type_ids", "mm_token_type_ids")
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


def _refuse_long_blocks(blocks: np.ndarray, limit: int) -> None:
    """Refuse blocks, marked in rows of shape `(R, L)`, bool, that a window of `limit` tokens would cut."""
    longest = max(len(run) for row in blocks for run in "".join(np.where(row, "x", " ")).split() or [""])
    if longest > limit:
        raise ValueError(
            f"An image has {longest} tokens, and in layers with `sliding_window={limit}` all of them see one another: "
            "give the processor a smaller `max_soft_tokens`, or set `padding_free=False`."
        )


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

    def on_host(self, rows: Inputs, num_features: int) -> "CollatedImageRows":
        if found := [name for name in _OTHER_MEDIA if rows.get(name) is not None]:
            raise ValueError(
                f"The processor gave `{found[0]}`: videos and audio cannot be trained on without padding, images can. "
                "Leave them out of the messages, or set `padding_free=False`."
            )
        examples = rows.pop(_EXAMPLES)
        return CollatedImageRows(self, rows, len(examples), examples, list(map(images_key, examples)))

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return rows["labels"] if "labels" in rows else super().row_labels(rows)

    def images(self, rows: Inputs, keys: Sequence[str]) -> RowImages | None:
        """What the flat batch has to know of the images of examples with these `keys`; `None` if rows have none."""
        rules = self.rules
        assert rules is not None
        if not (rows["input_ids"] == rules.token_id).any():
            return None
        copies = len(rows["input_ids"]) // len(keys)
        groups = np.unique(keys, return_inverse=True)[1].tolist() * copies
        types = rows.get(rules.block_row)
        blocks = None if types is None else np.isin(types.numpy(), rules.block_types)
        grids = {}
        if rules.counts_grids and "mm_token_type_ids" in rows and "image_grid_thw" in rows:
            grids = {name: rows[name] for name in (*COUNTED_ROWS, "image_grid_thw")}
        if rules.counts_grids and not grids:
            raise ValueError(
                "The model counts positions of image tokens by what this package does not know: its processor gives no "
                "`mm_token_type_ids` with `image_grid_thw`. Set `padding_free=False`."
            )
        if rules.longest_block is not None and blocks is not None:
            _refuse_long_blocks(blocks, rules.longest_block)
        num_pixels = sum(image.numel() for image in rows.get("pixel_values", ()))
        return RowImages(rules.token_id, groups, copies, blocks, grids, num_pixels)


@dataclass
class VisionPreferenceCollator(FlatVisionCollator, DataCollatorForVisionPreference):
    """Collator of preference pairs with images: TRL's. With `padding_free`, each image is there once."""

    def rows(self, examples: list[Example]) -> Inputs:
        return dict(replace(self, processor=ImagesOnce(self.processor)).padded(examples))  # type: ignore[arg-type]


@dataclass
class VisionLanguageModelingCollator(FlatVisionCollator, DataCollatorForVisionLanguageModeling):
    """Collator of instructions with images: TRL's."""

    prefix_sharing: bool = False


@dataclass(frozen=True)
class CollatedImageRows(CollatedRows):
    """The rows of a batch with images, and what belongs to their images."""

    collator: FlatVisionCollator
    examples: Sequence[Example] = ()  # processed again, where images of some cannot be cut out of those of all
    keys: Sequence[str] = ()  # for each example, what its images have in common with equal ones

    def take(self, examples: Sequence[int]) -> "CollatedImageRows":
        chosen, keys = [self.examples[i] for i in examples], [self.keys[i] for i in examples]
        images = take_images(self.rows, examples, [len(images_of(example)) for example in self.examples])
        if images is None:  # of rows, those that were collated stay: a subclass may have edited them
            images = {name: x for name, x in self.collator.rows(chosen).items() if name not in _ROWS}
        numbers = self.row_numbers(examples)
        rows = {name: x[numbers] for name, x in self.rows.items() if name in _ROWS}
        return CollatedImageRows(self.collator, {**rows, **images}, len(chosen), chosen, keys)

    def with_flat(self, reach: int | None = None) -> Inputs:
        batch = self.collator.flatten(self.rows, reach, self.collator.images(self.rows, self.keys))
        # A plain dict with the rows first: the data loader asks the first value for its length, and moves the others
        return {"input_ids": self.rows["input_ids"], **self.rows, "flat_batch": batch}


def take_images(rows: Inputs, examples: Sequence[int], counts: Sequence[int]) -> Inputs | None:
    """
    What belongs to the images of some examples of a batch, whose examples have so many images each.

    Processors stack it by example, by image, or by patch of each image's grid. Where the lengths do not tell which, the
    images have to be processed again: `None`.
    """
    of_images = [name for name in rows if name not in _ROWS]
    if of_images and not any(counts):  # images that were not found in the examples
        return None
    ends = np.cumsum([0, *counts]).tolist()
    cuts = [list(counts), [min(count, 1) for count in counts]]
    # Images of four dimensions may be tiles, of which there may be as many as examples
    pixels = rows.get("pixel_values")
    if 0 not in counts or not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
        cuts.append([1] * len(counts))
    if "image_grid_thw" in rows and len(rows["image_grid_thw"]) == ends[-1]:
        patches = rows["image_grid_thw"].prod(-1).tolist()
        cuts.append([sum(patches[a:b]) for a, b in zip(ends, ends[1:], strict=False)])
    taken: Inputs = {}
    for name in of_images:
        sizes = {tuple(cut) for cut in cuts if sum(cut) == len(rows[name])}
        if len(sizes) != 1:
            return None
        firsts = np.cumsum([0, *(cut := sizes.pop())])
        index = [k for i in examples for k in range(firsts[i], firsts[i] + cut[i])]
        taken[name] = rows[name][index] if isinstance(rows[name], torch.Tensor) else [rows[name][k] for k in index]
    return taken if sum(counts[i] for i in examples) else {}
