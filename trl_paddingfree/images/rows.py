"""The images of a flat batch: which feature goes to which placeholder, which images are equal, and image blocks.

A model merges the images of a flat row itself: at each placeholder token, it writes the next feature of its vision
tower. Shape legend: see `segments`; in addition
    S = sources, each the images of one row, or of several rows with equal ones, in the order of the tower
    F = features of the images, in the order of the tower, source by source
    I = placeholders on the flat axis; several of them may need the same feature, if rows share a source
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs, Make
from ..core.flat.layout import FlatLayout
from ..core.flat.transfer import HasTensors, on_device
from ..core.model.flat_model import FlatModel
from ..core.model.hooks import PassHook
from ..core.model.restored import Change

# As models return them: one tensor for all images, or one for each
Features = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]

Arrays = Sequence[np.ndarray]  # one for each row

# Rows are compared by ids, in which the placeholder of feature `f` is this plus `f`: beyond any vocabulary, and unlike
# negative numbers, never -100, because labels have these ids, too
_FIRST_FEATURE = 2**40


def mismatch(found: str) -> ValueError:
    """The error for rows whose placeholders and images differ in number."""
    # Begins with transformers' words: to errors that have them, TRL's trainers add that `max_length` may cut an image
    return ValueError(
        f"Image features and image tokens do not match, {found}. Padded TRL fails on these rows, too, "
        "unless `mask_truncated_completions=True` leaves out a completion whose tools have returned images. Either "
        "`max_length` cuts an image or, in trainers that generate, a completion has image tokens "
        "(`config.image_token_id`) beside those of its images: TRL keeps it from sampling them, unless "
        "`generation_kwargs` or vLLM decide."
    )


@dataclass(frozen=True)
class VisionRules:
    """How a vision-language model reads the images of a row."""

    token_id: int  # the placeholder
    has_blocks: bool = False  # whether the tokens of an image see one another in both directions
    longest_block: int | None = None  # the most tokens of an image, if they see each other whatever a layer's window
    patches: int = 0  # grid patches per placeholder, if positions are counted by grids; else 0


@dataclass(frozen=True)
class RowImages:
    """
    The images of `R` rows, from which those of their flat batch are made.

    >>> images, rows = RowImages(VisionRules(9), sources=[0, 1]), [np.array([1, 9, 9, 2]), np.array([1, 9, 9, 3])]
    >>> [row.tolist() for row in images.identities(rows)]
    [[1, 1099511627776, 1099511627777, 2], [1, 1099511627778, 1099511627779, 3]]
    """

    rules: VisionRules
    sources: Sequence[int]  # the source of each row, numbered from 0 in the order of the rows
    grids: torch.Tensor | None = None  # (images, 3) int64, on the CPU: of all sources, if images have any
    # For arguments of the model that may have entries of other images, too: which entries belong to the sources
    kept: tuple[tuple[str, torch.Tensor], ...] = ()
    num_pixels: int = 0  # how many pixel values the vision tower gets for the sources
    own: Mapping[str, Sequence[slice]] | None = None  # of arguments of the model, the entries of each row, if known

    def firsts(self, rows: Arrays) -> np.ndarray:
        """
        `(S+1,)` int64: where the features of each source begin, one per placeholder. Refuses rows of one source with
        different numbers of placeholders.
        """
        counts = [int((row == self.rules.token_id).sum()) for row in rows]
        of_source = dict(zip(self.sources, counts, strict=True))
        if counts != [of_source[source] for source in self.sources]:
            raise mismatch(f"tokens of rows, some of which share images: {counts}")
        return np.cumsum([0, *of_source.values()])

    def identities(self, rows: Arrays) -> list[np.ndarray]:
        """`R` int64 arrays by which rows are compared: tokens, and a number of its own for each feature."""
        firsts = _FIRST_FEATURE + self.firsts(rows)[list(self.sources)] - 1
        of_rows = zip(rows, firsts, strict=True)
        return [np.where(mask := row == self.rules.token_id, first + np.cumsum(mask), row) for row, first in of_rows]

    def flatten(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> FlatBatch:
        """[`FlatBatch.from_padded`] of rows with these images. Rows whose images differ share nothing from these on."""
        real = attention_mask != 0
        rows = [row[mask] for row, mask in zip(input_ids.numpy(), real.numpy(), strict=True)]
        ids = input_ids.masked_scatter(real, torch.from_numpy(np.concatenate([*self.identities(rows)])))
        targets = torch.where((labels == input_ids) & (labels != IGNORE_INDEX), ids, labels)
        batch = FlatBatch.from_padded(ids, attention_mask, targets, **options)
        paths = [index[mask] for index, mask in zip(batch.row_index.numpy(), real.numpy(), strict=True)]
        tokens, layout = batch.input_ids, batch.layout
        if (blocks := self.blocks(rows, paths, tokens.size(1))) is not None:
            layout = FlatLayout.from_segments(layout.segments, blocks)
        return replace(
            batch,
            input_ids=self._as_placeholders(tokens),
            shift_labels=self._as_placeholders(batch.shift_labels),
            layout=layout,
            hooks=(*batch.hooks, self.flat(rows, paths, tokens[0].numpy())),
        )

    def _as_placeholders(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.masked_fill(ids >= _FIRST_FEATURE, self.rules.token_id)

    def counted(self, rows: Arrays, firsts: np.ndarray) -> dict[str, torch.Tensor]:
        """Arguments of `get_rope_index`, with which a model counts positions: right-padded rows, and their grids."""
        if self.grids is None or not self.rules.patches:
            return {}
        ends = np.cumsum([0, *(self.grids.prod(1) // self.rules.patches).tolist()])
        if firsts[-1] != ends[-1] or not np.isin(firsts, ends).all():
            raise mismatch(f"tokens: {firsts[-1]}, images end after: {ends[1:].tolist()}")
        cuts, ids = np.searchsorted(ends, firsts), list(map(torch.from_numpy, rows))
        padded, mask = (pad_sequence(x, batch_first=True) for x in (ids, list(map(torch.ones_like, ids))))
        return {
            "input_ids": padded,
            "attention_mask": mask,
            "mm_token_type_ids": mask * (padded == self.rules.token_id),
            "image_grid_thw": torch.cat([self.grids[cuts[source] : cuts[source + 1]] for source in self.sources]),
        }

    def blocks(self, rows: Arrays, paths: Arrays, size: int) -> np.ndarray | None:
        """`(size,)` int64: the image block of each flat token, or -1; `None` if the model has no such blocks."""
        if not self.rules.has_blocks:
            return None
        flat, longest = np.full(size, -1), self.rules.longest_block
        for row, path in zip(rows, paths, strict=True):
            inside = row == self.rules.token_id
            begins = inside & np.diff(inside, prepend=False)
            numbers = np.cumsum(begins)[inside] - 1  # the block of each of these tokens
            most = np.bincount(numbers, minlength=1).max()
            if longest is not None and most > longest:
                raise ValueError(
                    f"An image has {most} tokens, and in layers with `sliding_window={longest}` all of them see one "
                    "another: give the processor a smaller `max_soft_tokens`, or set `padding_free=False`."
                )
            flat[path[inside]] = path[begins][numbers]  # the place of its first token, the same in rows that share it
        return flat

    def flat(self, rows: Arrays, paths: Arrays, tokens: np.ndarray) -> "FlatImages":
        """The images of a flat batch, from the identities of its `tokens`; `paths` has each row's places among them."""
        index, firsts = tokens[tokens >= _FIRST_FEATURE] - _FIRST_FEATURE, self.firsts(rows)
        return FlatImages(
            num_features=int(firsts[-1]),
            feature_index=None if np.array_equal(index, np.arange(firsts[-1])) else torch.from_numpy(index),
            grids=self.counted(rows, firsts),
            places=np.concatenate(paths),
            kept=self.kept,
            num_pixels=self.num_pixels,
            rules=self.rules,
            own=self.own,
        )


@dataclass(frozen=True)
class FlatImages(HasTensors, PassHook):
    """The images of a flat batch, which a pass of it gets."""

    takes = ("pixel_values",)

    num_features: int  # `F`, counted by placeholders of the sources: the vision tower must give as many
    feature_index: torch.Tensor | None  # (I,) int64: the feature at each placeholder; `None` if it is 0, 1, 2, ...
    grids: Mapping[str, torch.Tensor]  # see [`RowImages.counted`]; they stay on the CPU, where positions are counted
    places: np.ndarray  # flat positions of the rows' tokens, one row after another, int64
    kept: tuple[tuple[str, torch.Tensor], ...]  # see [`RowImages`]
    num_pixels: int
    rules: VisionRules
    own: Mapping[str, Sequence[slice]] | None  # see [`RowImages`]

    @staticmethod
    def of(batch: FlatBatch) -> "FlatImages | None":
        """The images of a batch; `None` if its rows have none."""
        return next((hook for hook in batch.hooks if isinstance(hook, FlatImages)), None)

    @property
    def numbers(self) -> int:  # type: ignore[override]
        return self.num_pixels

    def alone(self, row: int, inputs: Inputs, make: Make) -> tuple[Inputs, Make]:
        if self.own is None:
            raise ValueError("it is not known which of its batch's images belong to which row")
        inputs, has_any = dict(inputs), bool((inputs["input_ids"] == self.rules.token_id).any())
        for name, entries in self.own.items():
            value = inputs.pop(name, None)
            if value is not None and has_any:  # where images are stacked, rows without have an entry, too
                inputs[name] = value[entries[row]]
        grids = inputs.get("image_grid_thw")
        return inputs, RowImages(self.rules, [0], None if grids is None else grids.cpu()).flatten

    def inputs(self, flat_model: FlatModel, batch: FlatBatch, inputs: Inputs) -> Inputs:
        positions = self.positions(flat_model.model, batch.position_ids, batch.layout)
        return {**self.arguments(inputs), "position_ids": positions}

    def changes(self, flat_model: FlatModel, batch: FlatBatch) -> list[Change]:
        return [self.features_in_order(flat_model.model)]

    def arguments(self, of_all: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments with only the images of the sources, and without images if there are none."""
        arguments = dict(of_all)
        for name, entries in self.kept:
            if name in of_all and len(entries) < len(of_all[name]):
                arguments[name] = of_all[name].index_select(0, entries.to(of_all[name].device))
            if not len(entries):
                arguments.pop(name, None)
        return arguments

    def features_in_order(self, model: Any) -> Change:
        """The change by which a model's image features come in the order of the flat row's placeholders."""
        backbone = model.base_model
        features_of = backbone.get_image_features

        def get_image_features(*args, **kwargs):
            outputs = features_of(*args, **kwargs)
            outputs.pooler_output = self._ordered(outputs.pooler_output)
            if vars(outputs).get("deepstack_features") is not None:
                outputs.deepstack_features = [self._ordered(level) for level in outputs.deepstack_features]
            return outputs

        return backbone, "get_image_features", get_image_features

    def _ordered(self, features: Features) -> Features:
        """Features in the order of the placeholders, as a tensor, tuple or list, as the model returns them."""
        parts = features if isinstance(features, list | tuple) else [features]
        flat = torch.cat([part.reshape(-1, part.size(-1)) for part in parts])
        if len(flat) != self.num_features:
            raise mismatch(f"tokens: {self.num_features}, features: {len(flat)}")
        if self.feature_index is None:
            return features
        flat = flat.index_select(0, self.feature_index.to(flat.device))
        if isinstance(features, list | tuple):
            return type(features)([flat])
        return flat if features.dim() == 2 else flat[:, None]

    def positions(self, model: Any, position_ids: torch.Tensor, layout: FlatLayout) -> torch.Tensor:
        """Positions of flat tokens: `(1, T)`, or `(3, 1, T)` where the model counts them by the images' grids."""
        if not self.grids:
            return position_ids

        def count():  # by the model's own function, on the CPU, because it reads each grid's numbers
            of_rows, _ = model.base_model.get_rope_index(**self.grids)
            flat = torch.zeros(3, *position_ids.shape, dtype=torch.long)
            flat[:, 0, self.places] = of_rows[:, self.grids["attention_mask"] > 0]
            return on_device(flat, position_ids.device)

        return layout.derived("grid positions", count)
