"""The images of examples: where they are found, and which examples to try a model on."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from pyarrow import types
from transformers.image_utils import load_image
from trl.data_utils import prepare_multimodal_messages

from ..data.lengths import AnyDataset, Example, has_known_lengths
from ..data.validate import column_names
from ..flat.batch import IGNORE_INDEX, Inputs

if TYPE_CHECKING:
    from .collate import FlatVisionCollator

# How many examples are searched for images
_EXAMPLES_SEARCHED = 256
# The kind of an [`ImageProbe`] for prompts without images, to which tools or environments may add some
MADE_UP = "made-up"


def has_images(dataset: AnyDataset) -> bool:
    """Whether TRL takes a data set for one with images. Anything but a data set is left for TRL to refuse."""
    is_dataset = isinstance(dataset, Dataset | IterableDataset)
    return is_dataset and not {"image", "images"}.isdisjoint(column_names(dataset))


def first_with_images(dataset: Dataset) -> int:
    """The number of the first example that has an image in its column, 0 if none has."""
    name, before = "image" if "image" in dataset.column_names else "images", 0
    for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=100):
        column = table[name]
        is_list = types.is_list(column.type) or types.is_large_list(column.type)
        filled = pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0) if is_list else column.is_valid()
        if (found := np.flatnonzero(filled.to_numpy())).size:
            return before + int(found[0])
        before += len(table)
    return 0


def first_examples(dataset: AnyDataset, columns: Collection[str] | None = None) -> Iterator[Example]:
    """Examples from one before the first that has an image in its column, with some of their columns, or all."""
    if has_images(dataset) and has_known_lengths(dataset):
        dataset = dataset.select(range(max(first_with_images(dataset) - 1, 0), len(dataset)))
    return ({k: v for k, v in row.items() if columns is None or k in columns} for row in dataset)


def prompt_in_messages(example: Example) -> Example:
    """A prompt with images as a conversation that holds them, as TRL makes it."""
    prompt = example["prompt"]
    is_text = isinstance(prompt, str)  # TRL adds images to conversations only
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    return {"images": [], "messages": prepare_multimodal_messages(messages, [] if is_text else _in_columns(example))}


def made_up_examples() -> Iterator[Example]:
    """Conversations with and without images of noise, where the data shows none that may come."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for height, width in ((224, 224), (224, 448), (0, 0)):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = [{"type": "image", "image": Image.fromarray(picture)}] if height else []
        yield {"images": [], "messages": [{"role": "user", "content": [*image, {"type": "text", "text": "What?"}]}]}


def _in_columns(example: Example) -> list[object]:
    images = [example["image"]] if "image" in example else list(example.get("images") or [])  # TRL reads one of them
    return [image for image in images if image is not None]


def images_of(example: Example) -> list[Any]:
    """The images of an example, in its column and its messages: each an image of Pillow, an array, or text to load."""
    images = _in_columns(example)
    for messages in example.values():
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                images += _image_of(part)
    return images


def _image_of(part: Example) -> list[object]:
    """The image in a part of a message, if there is one: itself, what to load it from, or OpenAI's `image_url`."""
    if part.get("type") == "image_url":
        url = part["image_url"]
        return [url["url"] if isinstance(url, dict) else url]
    names = ("image", "url", "path", "base64") if part.get("type") == "image" else ()
    return [part[name] for name in names if part.get(name) is not None]


def inverted(value: Any, is_image: bool = False) -> Any:
    """An example with its images inverted, in its columns and in its messages: other images of the same sizes."""
    from PIL import Image, ImageChops

    if is_image and isinstance(value, str):  # a path, an address or base64
        value = load_image(value)
    if isinstance(value, Image.Image):
        return ImageChops.invert(value.convert("RGB"))
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.max() - value + value.min()  # in this order, within the range of the dtype
    if isinstance(value, list):
        return [inverted(entry, is_image) for entry in value]
    if isinstance(value, dict) and isinstance(value.get("type"), str) and (images := _image_of(value)):
        return {"type": "image", "image": inverted(images[0], is_image=True)}
    if isinstance(value, dict):
        return {name: inverted(entry, is_image=name in ("image", "images")) for name, entry in value.items()}
    return value


class ImageProbe:
    """
    The user's own first examples to try a model on, in batches of the trainer's collator: two with different images,
    the same with images inverted, and one without images, as far as the data has them.
    """

    def __init__(self, collator: "FlatVisionCollator", examples: Iterable[Example], kind: str = "the data's"):
        self.collator, self.kind = collator, kind
        self.examples: dict[str, Example] = {}
        for example in islice(examples, _EXAMPLES_SEARCHED):
            if not images_of(example):
                self.examples.setdefault("text", example)
            elif "first" not in self.examples:
                self.examples |= {"first": example, "inverted": inverted(example)}
            elif not _are_equal(example, self.examples["first"]):
                second = self.examples.setdefault("second", example)
                if _sizes(second) == _sizes(self.examples["first"]) != _sizes(example):
                    self.examples["second"] = example
                if "text" in self.examples and _sizes(self.examples["second"]) != _sizes(self.examples["first"]):
                    break
        if "second" in self.examples:
            self.examples["second, inverted"] = inverted(self.examples["second"])

    @property
    def names(self) -> tuple[str, ...]:
        """The examples to try together, by their names; empty if no example with images was found."""
        wanted = ("first", "inverted", "second", "text")
        return tuple(name for name in wanted if name in self.examples) if "first" in self.examples else ()

    def variants(self) -> list[tuple[Sequence[str], list[int]]]:
        """The same examples with other images in some of them, and the places of those whose images stay."""
        first, inverted, *others = self.names
        swapped = [inverted, first, *others]
        changed = [first, inverted, *("second, inverted" if name == "second" else name for name in others)]
        found = [(names, [i for i, name in enumerate(names) if name == self.names[i]]) for names in (swapped, changed)]
        return [(names, staying) for names, staying in found if 0 < len(staying) < len(names)]

    def to_count(self, prefix_sharing: bool) -> list[Inputs]:
        """Flat batches by which memory is counted: with the images of one example, and of two if these differ."""
        seen = [name for name in ("first", "second") if name in self.examples]
        return [self.flat(names, prefix_sharing) for names in dict.fromkeys([*((name,) for name in seen), (*seen,)])]

    def padded(self, names: Sequence[str]) -> Inputs:
        """TRL's batch of some examples, with all tokens scored."""
        return _scoring_all(self.collator.padded([self.examples[name] for name in names]))

    def flat(self, names: Sequence[str], prefix_sharing: bool) -> Inputs:
        """The flat batch of some examples, with all tokens scored."""
        examples = [self.examples[name] for name in names]
        collator = replace(self.collator, prefix_sharing=prefix_sharing)
        return collator.collated_rows(_scoring_all(collator.rows(examples)), examples).with_flat()


def _scoring_all(rows: Inputs) -> Inputs:
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORE_INDEX)
    others = ("completion_mask", "label")  # and KTO's mismatched rows, which have the same images
    scored = {name: x for name, x in rows.items() if name not in others and not name.startswith("KL_")}
    return {**scored, "labels": labels}


def _are_equal(one: Example, other: Example) -> bool:
    ones, others = images_of(one), images_of(other)
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


def _sizes(example: Example) -> list[tuple[int, ...]]:
    return [np.shape(image) for image in images_of(example)]
