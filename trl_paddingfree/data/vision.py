"""Collators of images and text: TRL's rows, each image processed once, and beside them the flat batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..batching.budget import split_by_tokens
from ..flat.batch import IGNORE_INDEX, FlatBatch
from ..flat.images import COUNTED_ROWS, RowImages, VisionRules
from .collate import FlatCollator
from .images import images_key, images_of

# What a processor and TRL's collators give row by row; all else belongs to images
_ROWS = ("input_ids", "attention_mask", "completion_mask", "labels", "token_type_ids", "mm_token_type_ids")
_OTHER_MEDIA = ("pixel_values_videos", "input_features", "audio_values", "input_values")


class ImagesOnce:
    """
    A processor that processes each image once, though TRL gives it each prompt twice, for the chosen and for the
    rejected row: it processes the first half of images and prompts, and doubles the rows only.

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


@dataclass
class FlatVisionCollator(FlatCollator):
    """
    What the collators of this module add to TRL's.

    With `padding_free`, rows come with a `"flat_batch"`. A batch of more than `max_tokens` tokens comes as its rows and
    its `"parts"`, whose images are cut out of those of the whole where that is possible.

    Args:
        padding_free, prefix_sharing, max_tokens:
            See [`~trl_paddingfree.data.collate.FlatCollator`].
        rules ([`~trl_paddingfree.flat.images.VisionRules`], *optional*):
            What the model wants to know. Needed if `padding_free`.
    """

    copies: ClassVar[int]
    rules: VisionRules | None = None

    def rows(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's rows, with one copy of what belongs to images."""
        raise NotImplementedError

    def padded(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch."""
        trl: Any = super(FlatCollator, self)
        return trl.torch_call(list(map(dict, examples)))  # TRL's collators change examples

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.padding_free:
            return self.padded(examples)
        whole, keys = self.rows(examples), [images_key(example) for example in examples]
        refuse_other_media(whole)
        batch = self.with_flat(whole, keys)
        if self.max_tokens is None or batch["flat_batch"].counts.computed <= self.max_tokens:
            return batch
        alone = [self.flatten(take_rows(whole, [i], len(examples)), [key]) for i, key in enumerate(keys)]
        parts = split_by_tokens([one.counts.computed for one in alone], self.max_tokens)
        if len(parts) == 1:
            return batch
        counts = [len(images_of(example)) for example in examples]
        batch["parts"] = []
        for part in parts:
            images = take_images(whole, part, counts)
            rows = take_rows(whole, part, len(examples))
            rows = self.rows([examples[i] for i in part]) if images is None else {**rows, **images}
            batch["parts"].append(self.with_flat(rows, [keys[i] for i in part]))
        return {name: value for name, value in batch.items() if name in (*_ROWS, "flat_batch", "parts")}

    def row_labels(self, rows: dict[str, Any]) -> torch.Tensor:
        if "labels" in rows:
            return rows["labels"]
        return rows["input_ids"].masked_fill(rows["completion_mask"] == 0, IGNORE_INDEX)

    def with_flat(self, rows: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
        """Rows with their flat batch."""
        # A plain dict with the rows first: the data loader asks the first value for its length, and moves the others
        return {"input_ids": rows["input_ids"], **rows, "flat_batch": self.flatten(rows, keys)}

    def flatten(self, rows: dict[str, Any], keys: Sequence[str] | None = None) -> FlatBatch:
        """
        The flat batch of TRL's rows.

        Args:
            rows (`dict[str, Any]`):
                The rows.
            keys (`Sequence[str]`, *optional*):
                For each example, what its images have in common with equal ones. `None` of rows that somebody edited.

        Raises:
            `ValueError`: Without `keys`: nobody knows which images such rows have.
        """
        if keys is None:
            raise ValueError(
                f"{type(self).__name__} edits rows that have images, and which ones they have then is not known: edit "
                "the examples before `super().torch_call(examples)`, score fewer tokens, or set `padding_free=False`."
            )
        return FlatBatch.from_padded(
            rows["input_ids"],
            self.row_labels(rows),
            rows["attention_mask"].sum(1).tolist(),
            prefix_sharing=self.prefix_sharing,
            images=self.images(rows, keys),
        )

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
            num_pixels=sum(image.numel() for image in rows.get("pixel_values", ())),
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
    prefix_sharing: bool = False

    def rows(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.padded(examples))


def refuse_other_media(rows: dict[str, Any]) -> None:
    """
    Refuse videos and audio, which nothing here puts in order.

    Raises:
        `ValueError`: Naming what the processor gave.
    """
    if found := [name for name in _OTHER_MEDIA if rows.get(name) is not None]:
        raise ValueError(
            f"The processor gave `{found[0]}`: videos and audio cannot be trained on without padding, images can. "
            "Leave them out of the messages, or set `padding_free=False`."
        )


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
