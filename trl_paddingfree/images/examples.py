"""The images of examples, and where to find them."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers.image_utils import load_image
from trl.data_utils import prepare_multimodal_messages

from ..core.data.lengths import AnyDataset, Example, has_images, has_known_lengths, tables_of


def first_with_images(dataset: Dataset) -> int:
    """The index of the first example with an image in its column; 0 if none has one."""
    name = "image" if "image" in dataset.column_names else "images"
    values = (value.as_py() for table in tables_of(dataset, name, rows=100) for value in table[name])
    return next((number for number, value in enumerate(values) if value), 0)


def first_examples(dataset: AnyDataset, columns: Collection[str] | None = None) -> Iterator[Example]:
    """Examples, from the one before the first with an image in its column, with only the given `columns`, or all."""
    if has_images(dataset) and has_known_lengths(dataset):
        dataset = dataset.select(range(max(first_with_images(dataset) - 1, 0), len(dataset)))
    return ({k: v for k, v in row.items() if columns is None or k in columns} for row in dataset)


def prompt_in_messages(example: Example) -> Example:
    """
    The conversation that TRL makes from a prompt and its images.

    >>> prompt_in_messages({"environment": "chess"})["messages"][0]["role"]
    'user'
    """
    prompt = example.get("prompt", "")  # environments may bring their own
    is_text = isinstance(prompt, str)  # TRL adds images to conversations only
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    return {"images": [], "messages": prepare_multimodal_messages(messages, [] if is_text else _in_columns(example))}


def made_up_examples() -> Iterator[Example]:
    """Conversations with and without made-up images, for images that may come but are not in the data."""
    from PIL import Image

    for images in ([Image.radial_gradient("L")], [Image.linear_gradient("L").resize((448, 224))], []):
        yield prompt_in_messages(
            {"prompt": [{"role": "user", "content": "What?"}], "images": [image.convert("RGB") for image in images]}
        )


def _in_columns(example: Example) -> list[Any]:
    images = [example["image"]] if "image" in example else list(example.get("images") or [])  # TRL reads one of them
    return [image for image in images if image is not None]


def with_each(example: Example, change: Callable[[Any], Any]) -> Example:
    """
    An example with `change` applied to each image in its column and its messages: a Pillow image, an array, or what to
    load it from.
    """

    def in_part(part):
        if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
            return part
        given = part.get("image_url") or part  # OpenAI's format, or that of processors
        named = {"image": given} if isinstance(given, str) else given
        found = [named[name] for name in ("image", "url", "path", "base64") if named.get(name) is not None]
        return {"type": "image", "image": change(found[0])} if found else part

    def in_message(message):
        content = message.get("content") if isinstance(message, dict) else None
        return {**message, "content": list(map(in_part, content))} if isinstance(content, list) else message

    changed = {k: list(map(in_message, v)) if isinstance(v, list) else v for k, v in example.items()}
    images = list(map(change, _in_columns(example)))
    if images:
        changed |= {"image": images[0]} if "image" in example else {"images": images}
    return changed


def images_of(example: Example) -> list[Any]:
    """The images of an example, in its column and its messages."""
    images: list = []
    with_each(example, images.append)
    return images


def inverted(image: Any) -> Any:
    """Another image of the same size."""
    from PIL import ImageChops

    if isinstance(image, np.ndarray | torch.Tensor):
        low, high = image.min(), image.max()
        if low == high:  # a blank one
            low, high = 0, 255 if "int" in str(image.dtype) else 1
        return high - image + low  # this order stays within the range of the dtype
    return ImageChops.invert(load_image(image) if isinstance(image, str) else image.convert("RGB"))
