"""The images of examples: where to find them, and which examples to try a model on."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers.image_utils import load_image
from trl.data_utils import prepare_multimodal_messages

from ..data.lengths import AnyDataset, Example, has_known_lengths, tables_of
from ..data.validate import column_names
from ..flat.batch import IGNORE_INDEX, Inputs

if TYPE_CHECKING:
    from .collate import FlatVisionCollator

# How many examples are searched for images
_EXAMPLES_SEARCHED = 256
# The kind of an [`ImageProbe`] for prompts without images, to which tools or environments may add some
MADE_UP = "made-up"


def has_images(dataset: AnyDataset) -> bool:
    """Whether TRL treats a data set as one with images. Anything but a data set is left for TRL to reject."""
    is_dataset = isinstance(dataset, Dataset | IterableDataset)
    return is_dataset and not {"image", "images"}.isdisjoint(column_names(dataset))


def first_with_images(dataset: Dataset) -> int:
    """The index of the first example with an image in its column; 0 if none has one."""
    name = "image" if "image" in dataset.column_names else "images"
    tables = tables_of(dataset, name, rows=100)
    values = (value.as_py() for table in tables for value in table[name])
    return next((number for number, value in enumerate(values) if value), 0)


def first_examples(dataset: AnyDataset, columns: Collection[str] | None = None) -> Iterator[Example]:
    """Examples, from the one before the first with an image in its column, with only the given `columns`, or all."""
    if has_images(dataset) and has_known_lengths(dataset):
        dataset = dataset.select(range(max(first_with_images(dataset) - 1, 0), len(dataset)))
    return ({k: v for k, v in row.items() if columns is None or k in columns} for row in dataset)


def prompt_in_messages(example: Example) -> Example:
    """The conversation that TRL makes from a prompt and its images."""
    prompt = example["prompt"]
    is_text = isinstance(prompt, str)  # TRL adds images to conversations only
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    return {"images": [], "messages": prepare_multimodal_messages(messages, [] if is_text else _in_columns(example))}


def made_up_examples() -> Iterator[Example]:
    """Conversations with and without made-up images, for images that may come but are not in the data."""
    from PIL import Image

    round_one, wide_one = Image.radial_gradient("L"), Image.linear_gradient("L").resize((448, 224))
    for images in ([round_one.convert("RGB")], [wide_one.convert("RGB")], []):
        yield prompt_in_messages({"prompt": [{"role": "user", "content": "What?"}], "images": images})


def _in_columns(example: Example) -> list[Any]:
    images = [example["image"]] if "image" in example else list(example.get("images") or [])  # TRL reads one of them
    return [image for image in images if image is not None]


def with_each(example: Example, change: Callable[[Any], Any]) -> Example:
    """
    An example with `change` applied to each image in its column and its messages: a Pillow image, an array, or what to
    load it from.
    """

    def in_part(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
            return part
        given = part.get("image_url", part)  # OpenAI's format, or that of processors
        named = {"image": given} if isinstance(given, str) else given
        found = [named[name] for name in ("image", "url", "path", "base64") if named.get(name) is not None]
        return {"type": "image", "image": change(found[0])} if found else part

    def in_message(message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        return {**message, "content": list(map(in_part, content))} if isinstance(content, list) else message

    changed = {k: list(map(in_message, v)) if isinstance(v, list) else v for k, v in example.items()}
    images = list(map(change, _in_columns(example)))
    return changed | ({"image": images[0]} if images and "image" in example else {"images": images} if images else {})


def images_of(example: Example) -> list[Any]:
    """The images of an example, in its column and its messages."""
    images: list[Any] = []
    with_each(example, images.append)
    return images


def inverted(image: Any) -> Any:
    """Another image of the same size."""
    from PIL import ImageChops

    if isinstance(image, np.ndarray | torch.Tensor):
        return image.max() - image + image.min()  # this order stays within the range of the dtype
    return ImageChops.invert(load_image(image) if isinstance(image, str) else image.convert("RGB"))


class ImageProbe:
    """
    The user's own first examples to try a model on, in batches of the trainer's collator: two with different images,
    the same two with their images inverted, and one without images, as far as the data has them.
    """

    def __init__(self, collator: "FlatVisionCollator", examples: Iterable[Example], kind: str = "the data's"):
        self.collator, self.kind = collator, kind
        self.examples: dict[str, Example] = {}
        first: list[Any] = []  # the images of the first example that has any
        for example in islice(examples, _EXAMPLES_SEARCHED):
            if not (images := images_of(example)):
                name = "text"
            elif not first:
                name, first = "first", images
            elif list(map(np.shape, images)) != list(map(np.shape, first)):
                name = "second"
            elif not all(map(np.array_equal, images, first)):
                name = "of equal size"
            else:
                continue
            self.examples.setdefault(name, example)
            if self.examples.keys() >= {"text", "second"}:
                break
        if "of equal size" in self.examples:  # if none of another size was found
            self.examples.setdefault("second", self.examples["of equal size"])
        for name in {"first", "second"} & self.examples.keys():
            self.examples[f"{name}, inverted"] = with_each(self.examples[name], inverted)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the examples to try together; empty if no example with images was found."""
        wanted = ("first", "first, inverted", "second", "text")
        return tuple(name for name in wanted if name in self.examples) if "first" in self.examples else ()

    def variants(self) -> list[tuple[Sequence[Any], list[int]]]:
        """Variants of the examples with other images in some, and the indices of those whose images stay."""
        one, other = self.names[:2]
        found: list[tuple[Sequence[Any], list[int]]] = []
        for changed in ({one: other, other: one}, {"second": "second, inverted"}):
            names = [changed.get(name, name) for name in self.names]
            staying = [i for i, name in enumerate(self.names) if name not in changed]
            if 0 < len(staying) < len(names):
                found.append((names, staying))
        return found

    def to_count(self, prefix_sharing: bool) -> list[Inputs]:
        """Flat batches from which memory is counted: of each example with different images alone, and of both."""
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
