"""The images of an example: where they stand, which examples have equal ones, and others of the same size."""

import hashlib
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from .preferences import column_names


def has_images(dataset: Any) -> bool:
    """Whether TRL takes a data set for one with images. What is none, it refuses in its own words."""
    is_dataset = isinstance(dataset, Dataset | IterableDataset)
    return is_dataset and not {"image", "images"}.isdisjoint(column_names(dataset))


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
    from PIL import ExifTags, Image  # text needs no Pillow

    if isinstance(image, str):  # a path, an address or base64
        return "str", image.encode()
    if isinstance(image, Image.Image):  # what loading it asks for: its palette, and which side is up
        kind = f"{image.mode} {image.size} {image.getpalette()} {image.info.get('transparency')}"
        return f"{kind} {image.getexif().get(ExifTags.Base.Orientation)}", image.tobytes()
    array = np.asarray(image)
    if array.dtype == object:  # nothing that could be compared: equal to nothing but itself
        return f"object {id(image)}", b""
    return f"{array.dtype} {array.shape}", array.tobytes()


def inverted(example: dict[str, Any]) -> dict[str, Any]:
    """The same example with other images of the same sizes: in its columns, and in its messages."""
    return {name: _inverted(value) for name, value in example.items()}


def _inverted(value: Any) -> Any:
    from PIL import Image, ImageChops

    if isinstance(value, Image.Image):
        return ImageChops.invert(value.convert("RGB"))
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.max() + value.min() - value
    if isinstance(value, list):
        return list(map(_inverted, value))
    if isinstance(value, dict):
        return {name: _inverted(entry) for name, entry in value.items()}
    return value
