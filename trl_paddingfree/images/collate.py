"""Collators of images and text: TRL's rows and their flat batch, with each image processed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import BatchFeature, ProcessorMixin
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..core.data.collate import (
    FlatCollator,
    FlatMismatchedCollator,
    LanguageModelingCollator,
    PreferenceCollator,
    UnpairedPreferenceCollator,
)
from ..core.data.lengths import Example
from ..core.data.rows import CollatedRows
from ..core.data.task import Task
from ..core.flat.batch import FlatBatch, Inputs, Make
from ..core.model.architecture import TYPE_ROWS
from ..core.model.edits import EditedRowsError
from .cuts import IMAGE_ARGUMENTS, PER_ROW, Cuts, entries_of, equal_images, numbered, row_cuts, spans_of
from .examples import images_of
from .rows import RowImages, VisionRules

# What processors and TRL's collators return with one entry per row. Everything else belongs to images
_MASKED = ("input_ids", "attention_mask", "completion_mask", *TYPE_ROWS)
_ROWS = (*_MASKED, "labels", "label", *(f"KL_{name}" for name in _MASKED))
# The key under which `torch_call` returns the examples and what belongs to their images, for `collated_rows`
_EXAMPLES = "examples"
# With one of these, pixels have one entry per image or patch or, with a mask, per example
_TELLING = ("image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask")
_OTHER_MEDIA = ("pixel_values_videos", "input_features", "audio_values", "input_values")


class ImagesOnce:
    """A processor for TRL's collator of pairs, which gives it each prompt twice: duplicates rows, but not images."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["processor"], name)  # TRL's collator reads its attributes

    def __call__(self, text: list[str], images: list[Any] | None = None, **kwargs: Any) -> BatchFeature:
        if images is None:  # completions, or prompts without images
            return self.processor(text=text, **kwargs)
        half = len(text) // 2
        output = self.processor(text=text[:half], images=images[:half], **kwargs)
        for name in _ROWS:
            if name in output:
                output[name] = torch.cat([output[name]] * 2)
        return output


@dataclass
class FlatVisionCollator(FlatCollator):
    """What the collators of this module add to TRL's: with `padding_free`, rows come with a `"flat_batch"`."""

    padded_by: ClassVar[tuple[str, ...]] = ()
    takes_subclasses: ClassVar[bool] = False  # which may process images in a way of their own
    rules: VisionRules | None = None  # how the model reads images; needed if `padding_free`
    is_tried: bool = True  # whether the start-up check has tried images

    def rows(self, examples: list[Example]) -> Inputs:
        """TRL's rows, with each image once."""
        return self.padded(examples)

    def padded(self, examples: list[Example]) -> Inputs:
        """TRL's batch."""
        # TRL's collators modify examples
        return super(FlatCollator, self).torch_call(list(map(dict, examples)))  # type: ignore[misc]

    def torch_call(self, examples: list[Example]) -> Inputs:
        if not self.padding_free:
            return self.padded(examples)
        # A subclass may have dropped, added or reordered examples, and may add values of its own
        rows = self.rows(examples)
        return {**rows, _EXAMPLES: (examples, of_images(rows))}

    def collated_rows(self, rows: Inputs, features: list[Example]) -> "CollatedImageRows":
        if found := [name for name in _OTHER_MEDIA if rows.get(name) is not None]:
            raise ValueError(
                f"The processor gave `{found[0]}`: videos and audio cannot be trained on without padding, images can. "
                "Leave them out of the messages, or set `padding_free=False`."
            )
        if not self.is_tried and "pixel_values" in rows:
            raise ValueError(
                "The rows come with `pixel_values`, and the first examples of the train data have none, so that the "
                "start-up check has tried no images: shuffle the data, or set `padding_free=False`."
            )
        examples, made = rows.pop(_EXAMPLES, (features, of_images(rows)))
        assert self.rules is not None
        images = {name: rows[name] for name in made if name in rows}
        tokens = (rows["input_ids"][: len(examples)] == self.rules.token_id).sum(1).tolist()
        cuts = example_cuts(images, [len(images_of(example)) for example in examples], tokens)
        if self.keeps_rows and cuts is None and any(images.get(name) is not value for name, value in made.items()):
            raise EditedRowsError(
                f"{type(self).__name__} changes {', '.join(made)}, and which of them belong to which example is not "
                "known, so that a micro-batch cannot run in parts: edit the examples, or leave `memory_budget` and "
                "`max_tokens_per_micro_batch` out."
            )
        whole = CollatedImageRows(rows, len(examples), examples, range(len(examples)), cuts, [*images])
        return whole.with_images(rows, examples, equal_images(images, cuts)) if cuts else whole

    def row_labels(self, rows: Inputs) -> torch.Tensor:
        return rows["labels"] if "labels" in rows else super().row_labels(rows)


@dataclass
class VisionPreferenceCollator(FlatVisionCollator, DataCollatorForVisionPreference):
    """TRL's collator of preference pairs with images. With `padding_free`, each image appears once."""

    def rows(self, examples: list[Example]) -> Inputs:
        return self.changed(processor=ImagesOnce(self.processor)).padded(examples)


@dataclass
class VisionLanguageModelingCollator(FlatVisionCollator, DataCollatorForVisionLanguageModeling):
    """TRL's collator of instructions with images."""

    prefix_sharing: bool = False


@dataclass
class VisionUnpairedCollator(FlatMismatchedCollator, FlatVisionCollator, DataCollatorForVisionUnpairedPreference):
    """TRL's collator of desirable and undesirable completions with images."""


# By the collator of a task's text, that of its data with images
_WITH_IMAGES: dict[type, type[FlatVisionCollator]] = {
    PreferenceCollator: VisionPreferenceCollator,
    LanguageModelingCollator: VisionLanguageModelingCollator,
    UnpairedPreferenceCollator: VisionUnpairedCollator,
}


def vision_collator(task: Task) -> Any:
    """The class of a task's collator for data with images; `None` if the task takes none."""
    generated = None if issubclass(task.collator, FlatCollator) else VisionLanguageModelingCollator
    return task.vision_collator or _WITH_IMAGES.get(task.collator, generated)


@dataclass(frozen=True)
class CollatedImageRows(CollatedRows):
    """The rows of a batch with images, and what belongs to the images. Equal images appear once."""

    examples: Sequence[Example]  # processed again if the images of some cannot be cut out of the batch
    sources: Sequence[int]  # the source of each example, numbered in order; equal images share one
    # How many entries each source has in each argument that belongs to images; `None` if unknown
    cuts: Cuts | None = None
    names: Sequence[str] = ()  # of what belongs to images

    def with_images(self, rows: Inputs, examples: Sequence[Example], sources: Sequence[int]) -> "CollatedImageRows":
        """A batch of other `rows` and `examples`, with the images of the given `sources` of this one."""
        assert self.cuts is not None
        numbers, owners = numbered(sources)
        names = self.names if any(map(images_of, examples)) else ()
        rows = rows | {name: self.rows[name][entries_of(owners, self.cuts[name])] for name in names}
        cuts = {name: [cut[owner] for owner in owners] for name, cut in self.cuts.items()}
        return CollatedImageRows(rows, len(examples), examples, numbers, cuts, names)

    def take(self, examples: Sequence[int], collator: Any) -> "CollatedImageRows":
        chosen = [self.examples[i] for i in examples]
        texts = {name: x for name, x in self.rows.items() if name not in self.names}
        rows = CollatedRows(texts, self.num_items).take(examples, collator).rows
        if self.cuts is not None:
            return self.with_images(rows, chosen, [self.sources[i] for i in examples])
        rows |= of_images(collator.rows(chosen))  # only images: a subclass may have edited the rows
        return CollatedImageRows(rows, len(chosen), chosen, range(len(chosen)), names=self.names)

    def with_flat(self, collator: Any) -> Inputs:
        rows, rules = self.rows, collator.rules
        make: Make = FlatBatch.from_padded
        if rows.get("pixel_values") is not None or (rows["input_ids"] == rules.token_id).any():
            pixels = rows.get("pixel_values", ())
            if rules.patches and len(pixels) and not {"image_grid_thw", "mm_token_type_ids"} <= rows.keys():
                raise ValueError(
                    "The model counts positions of image tokens in a way that this package does not know: its "
                    "processor gives no `mm_token_type_ids` with `image_grid_thw`. Set `padding_free=False`."
                )
            sources = [*self.sources] * (len(rows["input_ids"]) // self.num_items)
            num_pixels = sum(map(torch.numel, pixels))
            grids, cuts = rows.get("image_grid_thw"), self.cuts
            own = None if cuts is None else {name: spans_of(sources, cut) for name, cut in cuts.items()}
            make = RowImages(rules, sources, grids, num_pixels=num_pixels, own=own).flatten
        # A plain dict with the rows first: the data loader takes the first value's length, and moves the others
        return {"input_ids": rows["input_ids"], **rows, "flat_batch": collator.flatten(rows, make)}


def of_images(rows: Inputs) -> Inputs:
    """The entries of a batch, or of a processor's output, that belong to images."""
    return {name: value for name, value in rows.items() if name not in _ROWS}


def example_cuts(images: Inputs, num_images: Sequence[int], tokens: Sequence[int]) -> Cuts | None:
    """
    How many entries each example has in each of `images`, by name, from its numbers of images and placeholders
    (`tokens`). `None` if the lengths do not tell, so that the images have to be processed again.
    """
    total, pixels = sum(num_images), images.get("pixel_values")
    if not images:
        return {}
    if pixels is None or not all(isinstance(x, torch.Tensor) for x in images.values()):
        return None
    is_known = images.keys() <= {*IMAGE_ARGUMENTS, PER_ROW} and (
        pixels.ndim == 4 or not images.keys().isdisjoint(_TELLING)
    )
    if total == len(num_images) and {*num_images} != {1} and not is_known:
        return None  # may be one entry per image, or one per example
    given = {**images, "num_images": [*num_images]}
    if pixels.ndim == 4 and len(pixels) != total:  # tiles, all with the same number of placeholders
        size = max(sum(tokens) // len(pixels), 1)
        if any(count % size for count in tokens):
            return None
        given["num_tiles"] = [count // size for count in tokens]
    try:
        return row_cuts(given)
    except (KeyError, RuntimeError, ValueError):  # TRL's or PyTorch's: the numbers do not add up
        return None
