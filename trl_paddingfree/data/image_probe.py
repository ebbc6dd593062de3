"""The user's own first examples with images, to try a model on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from ..flat.batch import IGNORE_INDEX
from .images import images_key, images_of, inverted
from .vision import FlatVisionCollator

# How many examples are searched for images
_EXAMPLES_SEARCHED = 256


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
        self.collator = collator
        self.examples: dict[str, dict[str, Any]] = {}
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

    def to_count(self, prefix_sharing: bool) -> list[dict[str, Any]]:
        """Flat batches with the images of one example, and of two if they have different ones."""
        seen = [name for name in ("first", "second") if name in self.examples]
        return [self.flat(names, prefix_sharing) for names in dict.fromkeys([*((name,) for name in seen), (*seen,)])]

    def padded(self, names: Sequence[str]) -> dict[str, Any]:
        """TRL's batch of some examples, with all tokens scored."""
        return _scoring_all(self.collator.padded([self.examples[name] for name in names]))

    def flat(self, names: Sequence[str], prefix_sharing: bool) -> dict[str, Any]:
        """The flat batch of some examples, with all tokens scored."""
        examples = [self.examples[name] for name in names]
        rows = _scoring_all(self.collator.rows(examples))
        collator: Any = replace(self.collator, prefix_sharing=prefix_sharing)  # type: ignore[type-var]
        return collator.with_flat(rows, list(map(images_key, examples)))


def _scoring_all(rows: dict[str, Any]) -> dict[str, Any]:
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, IGNORE_INDEX)
    return {**{name: value for name, value in rows.items() if name != "completion_mask"}, "labels": labels}


def _sizes(example: dict[str, Any]) -> list[Any]:
    return [np.shape(np.asarray(image)) for image in images_of(example)]
