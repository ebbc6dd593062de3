"""Collators of images and text: TRL's rows, each image processed once, and beside them the flat batch."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import ExifTags, Image, ImageChops
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..batching.budget import split_by_tokens
from ..flat.batch import IGNORE_INDEX, FlatBatch
from ..flat.images import COUNTED_ROWS, RowImages, VisionRules
from .preferences import column_names

# What a processor and TRL's collators give row by row; all else belongs to images
_ROWS = ("input_ids", "attention_mask", "completion_mask", "labels", "token_type_ids", "mm_token_type_ids")
# How many examples are searched for images to try a model on
_EXAMPLES_SEARCHED = 256
_OTHER_MEDIA = ("pixel_values_videos", "input_features", "audio_values", "input_values")


class ImagesOnce:
    """
    A processor to whom TRL gives each prompt twice, for the chosen and for the rejected row: it processes the first
    half of images and prompts, and doubles the rows only.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            The processor.
    """

    def __init__(self, processor: Any):
        self.processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["processor"], name)

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        if "images" not in kwargs:  # completions
            return self.processor(text=text, **kwargs)
        half = len(text) // 2
        images = kwargs.pop("images")
        output = self.processor(text=text[:half], images=None if images is None else images[:half], **kwargs)
        for name in _ROWS:
            if name in output:
                output[name] = torch.cat([output[name]] * 2)
        return output


class FlatVisionCollator:
    """
    What the collators of this module add to TRL's.

    With `padding_free`, rows come with a `"flat_batch"`. A batch of more than `max_tokens` tokens comes as its rows and
    its `"parts"`, whose images are cut out of those of the whole where that is possible.
    """

    copies: ClassVar[int]
    processor: Any
    padding_free: bool
    prefix_sharing: bool
    max_tokens: int | None
    rules: VisionRules | None

    def rows(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's rows, with one copy of what belongs to images."""
        raise NotImplementedError

    def padded(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch."""
        collate: Any = super().torch_call  # type: ignore[misc]
        return collate(list(map(dict, examples)))  # TRL's collators change examples

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.padding_free:
            return self.padded(examples)
        whole, keys = self.rows(examples), [images_key(example) for example in examples]
        refuse_other_media(whole)
        batch = self.flatten(whole, keys)
        if self.max_tokens is None or batch["flat_batch"].counts.computed <= self.max_tokens:
            return batch
        alone = [self.flatten(take_rows(whole, [i], len(examples)), [key]) for i, key in enumerate(keys)]
        parts = split_by_tokens([one["flat_batch"].counts.computed for one in alone], self.max_tokens)
        if len(parts) == 1:
            return batch
        counts = [len(images_of(example)) for example in examples]
        batch["parts"] = []
        for part in parts:
            images = take_images(whole, part, counts)
            rows = take_rows(whole, part, len(examples))
            rows = self.rows([examples[i] for i in part]) if images is None else {**rows, **images}
            batch["parts"].append(self.flatten(rows, [keys[i] for i in part]))
        return {name: value for name, value in batch.items() if name in (*_ROWS, "flat_batch", "parts")}

    def labels(self, rows: dict[str, Any]) -> torch.Tensor:
        """The token itself where it is scored, else -100."""
        if "labels" in rows:
            return rows["labels"]
        return rows["input_ids"].masked_fill(rows["completion_mask"] == 0, IGNORE_INDEX)

    def flatten(self, rows: dict[str, Any], keys: Sequence[str], labels: torch.Tensor | None = None) -> dict[str, Any]:
        """
        Add the flat batch to TRL's rows.

        Args:
            rows (`dict[str, Any]`):
                The rows.
            keys (`Sequence[str]`):
                For each example, what its images have in common with equal ones.
            labels (`torch.Tensor` of shape `(R, L)`, int64, *optional*):
                What is scored. Defaults to what the trainer scores.
        """
        flat_batch = FlatBatch.from_padded(
            rows["input_ids"],
            self.labels(rows) if labels is None else labels,
            rows["attention_mask"].sum(1).tolist(),
            prefix_sharing=self.prefix_sharing,
            images=self.images(rows, keys),
        )
        # A plain dict with the rows first: the data loader asks the first value for its length, and moves the others
        return {"input_ids": rows["input_ids"], **rows, "flat_batch": flat_batch}

    def images(self, rows: dict[str, Any], keys: Sequence[str]) -> RowImages | None:
        """What the flat batch has to know of the rows' images; `None` if they have none."""
        rules = self.rules
        assert rules is not None
        if not (rows["input_ids"] == rules.token_id).any():
            return None
        names: dict[str, int] = {}
        groups = [names.setdefault(key, len(names)) for key in keys] * self.copies
        blocks = rows.get(rules.block_row)
        grids = {}
        if rules.counts_grids and "mm_token_type_ids" in rows and "image_grid_thw" in rows:
            grids = {name: rows[name] for name in (*COUNTED_ROWS, "image_grid_thw")}
        return RowImages(
            token_id=rules.token_id,
            groups=groups,
            copies=self.copies,
            blocks=None if blocks is None else np.isin(blocks.numpy(), rules.block_types),
            grids=grids,
        )


@dataclass
class VisionPreferenceCollator(FlatVisionCollator, DataCollatorForVisionPreference):
    """
    Collator of preference pairs with images: TRL's [`~trl.trainer.dpo_trainer.DataCollatorForVisionPreference`].

    With `padding_free`, its rows come with a `"flat_batch"`, and each image is there once.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `True`):
            Whether prefixes that rows share are computed once.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch comes in `"parts"`.
        rules ([`~trl_paddingfree.flat.images.VisionRules`], *optional*):
            What the model wants to know. Needed if `padding_free`.
    """

    copies: ClassVar[int] = 2
    padding_free: bool = False
    prefix_sharing: bool = True
    max_tokens: int | None = None
    rules: VisionRules | None = None

    def rows(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        trl = DataCollatorForVisionPreference(
            ImagesOnce(self.processor),  # type: ignore[arg-type]
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        return dict(trl(list(map(dict, examples))))


@dataclass
class VisionLanguageModelingCollator(FlatVisionCollator, DataCollatorForVisionLanguageModeling):
    """
    Collator of instructions with images: TRL's [`~trl.trainer.sft_trainer.DataCollatorForVisionLanguageModeling`].

    With `padding_free`, its rows come with a `"flat_batch"`.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to add the flat batch.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether prefixes that rows share are computed once.
        max_tokens (`int`, *optional*):
            Most tokens to compute at once. A larger batch comes in `"parts"`.
        rules ([`~trl_paddingfree.flat.images.VisionRules`], *optional*):
            What the model wants to know. Needed if `padding_free`.
    """

    copies: ClassVar[int] = 1
    padding_free: bool = False
    prefix_sharing: bool = False
    max_tokens: int | None = None
    rules: VisionRules | None = None

    def rows(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.padded(examples))


def has_images(dataset: Any) -> bool:
    """Whether TRL takes a data set for one with images."""
    return dataset is not None and not {"image", "images"}.isdisjoint(column_names(dataset))


def refuse_other_media(rows: dict[str, Any]) -> None:
    """
    Refuse videos and audio, which nothing here puts in order.

    Raises:
        `ValueError`: Naming what the processor gave.
    """
    if found := [name for name in _OTHER_MEDIA if rows.get(name) is not None]:
        raise ValueError(
            f"The processor gave `{found[0]}`: videos and audio cannot be trained on without padding, images can. Leave "
            "them out of the messages, or set `padding_free=False`."
        )


def images_of(example: dict[str, Any]) -> list[Any]:
    """The images of an example: its column, and those that stand in its messages."""
    images = list(example.get("images") or ([example["image"]] if "image" in example else []))
    for messages in example.values():
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                given = [part[name] for name in ("image", "url", "path", "base64") if part.get(name) is not None]
                images += given if part.get("type") == "image" else []
    return images


def images_key(example: dict[str, Any]) -> str:
    """Text that examples with equal images have in common, and no others."""
    digest = hashlib.blake2b()
    for image in images_of(example):
        kind, data = _content(image)
        digest.update(f"{kind} {len(data)};".encode() + data)
    return digest.hexdigest()


def _content(image: Any) -> tuple[str, bytes]:
    """All that an image's features may depend on: what kind of image it is, and its bytes."""
    if isinstance(image, str):  # a path, an address or base64
        return "str", image.encode()
    if isinstance(image, Image.Image):  # what loading it asks for: its palette, and which side is up
        kind = f"{image.mode} {image.size} {image.getpalette()} {image.info.get('transparency')}"
        return f"{kind} {image.getexif().get(ExifTags.Base.Orientation)}", image.tobytes()
    array = np.asarray(image)
    if array.dtype == object:  # nothing that could be compared: equal to nothing but itself
        return f"object {id(image)}", b""
    return f"{array.dtype} {array.shape}", array.tobytes()


def take_rows(rows: dict[str, Any], examples: Sequence[int], num_examples: int) -> dict[str, Any]:
    """The rows of some examples, of all their copies, without what belongs to images."""
    copies = len(rows["input_ids"]) // num_examples
    index = [i + copy * num_examples for copy in range(copies) for i in examples]
    return {name: rows[name][index] for name in _ROWS if name in rows}


def take_images(rows: dict[str, Any], examples: Sequence[int], counts: Sequence[int]) -> dict[str, Any] | None:
    """
    What belongs to the images of some examples.

    Processors stack it by example, by image, or by patch of each image's grid. Where the lengths do not tell which, the
    images have to be processed again.

    Args:
        rows (`dict[str, Any]`):
            A batch.
        examples (`Sequence[int]`):
            Which ones.
        counts (`Sequence[int]`):
            Number of images of each example of the batch.

    Returns:
        `dict[str, Any]`, or `None` where the lengths do not tell.
    """
    ends = np.cumsum([0, *counts]).tolist()
    cuts = [[1] * len(counts), list(counts), [min(count, 1) for count in counts]]
    if "image_grid_thw" in rows and len(rows["image_grid_thw"]) == ends[-1]:
        patches = rows["image_grid_thw"].prod(-1).tolist()
        cuts.append([sum(patches[a:b]) for a, b in zip(ends, ends[1:], strict=False)])
    taken: dict[str, Any] = {}
    for name in (name for name in rows if name not in _ROWS):
        sizes = {tuple(cut) for cut in cuts if sum(cut) == len(rows[name])}
        if len(sizes) != 1:
            return None
        firsts = np.cumsum([0, *(cut := sizes.pop())])
        index = [k for i in examples for k in range(firsts[i], firsts[i] + cut[i])]
        taken[name] = rows[name][index] if isinstance(rows[name], torch.Tensor) else [rows[name][k] for k in index]
    return taken if sum(counts[i] for i in examples) else {}


class ImageProbe:
    """
    The user's own first examples with images, to try a model on: two of them, one of these with its image inverted, and
    one without images, as far as the data has them.

    Args:
        collator ([`FlatVisionCollator`]):
            The trainer's collator.
        examples (`Iterable[dict[str, Any]]`):
            The training data, from its first example on.

    Attributes:
        names (`tuple[str, ...]`):
            What the examples are called: `"first"` and `"inverted"`, `"second"` and `"text"` if there are such.
    """

    def __init__(self, collator: FlatVisionCollator, examples: Iterable[dict[str, Any]]):
        self.collator, self.examples = collator, {}
        for example in islice(examples, _EXAMPLES_SEARCHED):
            if not images_of(example):
                self.examples.setdefault("text", example)
            elif "first" not in self.examples:
                self.examples |= {"first": example, "inverted": inverted(example)}
            elif images_key(example) != images_key(self.examples["first"]):
                second = self.examples.setdefault("second", example)
                if _sizes(second) == _sizes(self.examples["first"]) != _sizes(example):
                    self.examples["second"] = example
                if "text" in self.examples and _sizes(self.examples["second"]) != _sizes(self.examples["first"]):
                    break
        if "second" in self.examples:
            self.examples["second, inverted"] = inverted(self.examples["second"])

    @property
    def names(self) -> tuple[str, ...]:
        """The examples to try together; none, if the data begins without images."""
        wanted = ("first", "inverted", "second", "text")
        return tuple(name for name in wanted if name in self.examples) if "first" in self.examples else ()

    def variants(self) -> list[tuple[list[str], list[str]]]:
        """The same examples with other images in some of them, and those whose images stay."""
        names = list(self.names)
        others = names[2:]
        swapped = (["inverted", "first", *others], others)
        changed = ["second, inverted" if name == "second" else name for name in names]
        staying = [name for name in names if name in changed]
        return [variant for variant in (swapped, (changed, staying)) if variant[1] and variant[0] != names]

    def padded(self, names: Sequence[str]) -> dict[str, Any]:
        """TRL's batch of some examples, with all tokens scored."""
        return _scoring_all(self.collator.padded([self.examples[name] for name in names]))

    def flat(self, names: Sequence[str], prefix_sharing: bool) -> dict[str, Any]:
        """The flat batch of some examples, with all tokens scored."""
        examples = [self.examples[name] for name in names]
        rows = _scoring_all(self.collator.rows(examples))
        collator: Any = replace(self.collator, prefix_sharing=prefix_sharing)  # type: ignore[type-var]
        return collator.flatten(rows, list(map(images_key, examples)))


def _scoring_all(rows: dict[str, Any]) -> dict[str, Any]:
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORE_INDEX)
    return {**{name: value for name, value in rows.items() if name != "completion_mask"}, "labels": labels}


def _sizes(example: dict[str, Any]) -> list[Any]:
    return [image.size if isinstance(image, Image.Image) else np.shape(image) for image in images_of(example)]


def inverted(example: dict[str, Any]) -> dict[str, Any]:
    """The same example with other images of the same sizes: in its columns, and in its messages."""
    return {name: _inverted(value) for name, value in example.items()}


def _inverted(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return ImageChops.invert(value.convert("RGB"))
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.max() + value.min() - value
    if isinstance(value, list):
        return list(map(_inverted, value))
    if isinstance(value, dict):
        return {name: _inverted(entry) for name, entry in value.items()}
    return value
