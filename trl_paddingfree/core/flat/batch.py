"""A batch of rows on one flat axis of tokens, and the mapping back to rows.

Shape legend: see `segments`; in addition
    P = scored tokens (those that predict a token that some row scores)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from .counts import BatchCounts
from .layout import FlatLayout
from .schedule import Schedule
from .segments import Segments, num_distinct_tokens, share_prefixes
from .transfer import HasTensors

IGNORE_INDEX = -100
# Keyword arguments of a model as a collator returns them: padded rows, their flat batch, image tensors
Inputs = dict[str, Any]


@dataclass(frozen=True)
class FlatBatch(HasTensors):
    """
    The tokens to compute, their labels, and where each row's tokens are.

    Row `r` is the flat tokens at `row_index[r][row_mask[r]]`. In rows whose labels are their own tokens, every scored
    token is followed by its label in the same segment. (When several processes share a batch,
    [`~trl_paddingfree.groups.sequence.share_of`] keeps the tokens of its share, but the rows and layout of the whole.)

    Args:
        input_ids, position_ids (`torch.Tensor` of shape `(1, T)`, int64):
            Tokens to compute, and the position of each in its own row, from 0.
        shift_labels, scored_index (`torch.Tensor` of shapes `(1, P)` and `(P,)`, int64):
            The token that each scored token predicts, and the flat position of the scored token. If nothing is scored,
            a single entry: -100 at position 0.
        row_index, row_mask (`torch.Tensor` of shape `(R, L)`, int64 and bool):
            Flat position of token `l` of row `r`, and whether that token exists; 0 where it does not.
        token_rows (`torch.Tensor` of shape `(1, T)`, int64):
            Number of rows that contain each token: its weight in the router loss, a mean over the tokens of all rows.
        scored (`np.ndarray` of shape `(P,)`, int64):
            Copy of `scored_index` on the host, where slices are planned and cut.
        layout (`FlatLayout`), counts (`BatchCounts`):
            The segments as index tensors for attention; how many tokens this and other methods compute.
        mismatched (`FlatBatch`, *optional*):
            Other rows of the same examples, computed in a separate call: KTO's mismatched completions.
        hooks (`tuple`, *optional*):
            What capabilities add to its passes, each a [`~trl_paddingfree.core.model.hooks.PassHook`]. Those that have
            tensors are [`HasTensors`], which go to the device with the batch.
        packed_length (`int`, *optional*):
            For documents that TRL has packed: the length of the single row in which TRL would compute them.
        empty_rows (`int`, *optional*, defaults to `0`):
            Number of rows without tokens. Pooled heads, which read one token per row, refuse them.
        checksum (`int`, *optional*, defaults to `0`):
            Checksum of rows and labels, on the host, by which processes verify that they got the same batch.
        schedule ([`~trl_paddingfree.core.flat.schedule.Schedule`], *optional*):
            How to compute the batch. Under a budget, the planner sets it as a pass begins.

    >>> from trl_paddingfree import FlatBatch
    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> batch.input_ids
    tensor([[1, 2, 3, 4, 2, 5]])
    >>> batch.position_ids
    tensor([[0, 1, 2, 3, 1, 2]])
    >>> batch.to_rows()
    [[1, 2, 3, 4], [1, 2, 5]]
    >>> batch.counts
    BatchCounts(computed=6, real=7, padded=8, distinct=5, repeated=1)
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    scored_index: torch.Tensor
    row_index: torch.Tensor
    row_mask: torch.Tensor
    token_rows: torch.Tensor
    scored: np.ndarray
    layout: FlatLayout
    counts: BatchCounts
    mismatched: "FlatBatch | None" = None
    hooks: tuple[Any, ...] = ()
    packed_length: int | None = None
    empty_rows: int = 0
    checksum: int = 0
    schedule: Schedule = Schedule()

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]],
        *,
        prefix_sharing: bool = True,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int = 0,
        width: int | None = None,
        reach: int | None = None,
    ) -> "FlatBatch":
        """
        Flatten rows. The inverse of [`FlatBatch.to_rows`].

        Args:
            rows, labels (`Sequence[Sequence[int]]`):
                Token ids of the `R` rows, already truncated, and labels: the token itself where it is scored, else
                -100. A row with any other label shares nothing.
            prefix_sharing (`bool`, *optional*, defaults to `True`):
                Whether to compute shared prefixes once, where that pays off: see
                [`~trl_paddingfree.core.flat.segments.share_prefixes`].
            pad_to_multiple_of, pad_token_id (`int`, *optional*, the latter defaults to `0`):
                Pad `T` to a multiple of this value, with this token. The padding is one segment that belongs to no row.
            width (`int`, *optional*):
                `L`, if the padded batch is wider than the longest row.
            reach (`int`, *optional*):
                Treat the longest row as this long, so that length-dependent rotary frequencies match those of the
                padded batch. Costs one token of padding.
        """
        tokens, targets = ([np.asarray(row, np.int64) for row in lists] for lists in (rows, labels))
        segments, segment_of, flat, distinct = _laid_out(tokens, targets, prefix_sharing)
        lengths = list(map(len, tokens))
        width = max([width or 0, *lengths])
        extends = reach is not None and reach > max(lengths)
        if tail := _padding(len(flat), pad_to_multiple_of, is_needed=not segment_of or extends):
            segments = segments.with_roots([tail])
            flat = np.append(flat, [pad_token_id] * tail)
        positions = segments.position_ids
        if reach is not None:
            positions = positions.clip(max=max(reach, *lengths) - 1)  # padding may be longer than any row
            if extends:
                positions[-1] = reach - 1  # the last token is padding

        row_mask = np.arange(width) < np.array(lengths)[:, None]
        row_index = np.zeros(row_mask.shape, np.int64)
        token_rows = np.zeros(len(flat), np.int64)  # not float: engines cast floats to their dtype
        flat_labels = np.full(len(flat), IGNORE_INDEX)
        paths = [segments.path(segment_of.get(r, 0))[: len(row)] for r, row in enumerate(tokens)]
        for r, (path, target) in enumerate(zip(paths, targets, strict=True)):
            row_index[r, : len(path)] = path
            token_rows[path] += 1
            scored = target[1:] != IGNORE_INDEX
            flat_labels[path[:-1][scored]] = target[1:][scored]
        scored_index = np.flatnonzero(flat_labels != IGNORE_INDEX)
        if not len(scored_index):
            scored_index = np.zeros(1, np.int64)
        seen = np.array(row_mask.shape), row_index, row_mask, flat, positions, flat_labels
        return cls(
            input_ids=torch.from_numpy(flat)[None],
            position_ids=torch.from_numpy(positions)[None],
            shift_labels=torch.from_numpy(flat_labels[scored_index])[None],
            scored_index=torch.from_numpy(scored_index),
            row_index=torch.from_numpy(row_index),
            row_mask=torch.from_numpy(row_mask),
            token_rows=torch.from_numpy(token_rows)[None],
            scored=scored_index,
            layout=FlatLayout.from_segments(segments),
            counts=BatchCounts(segments.num_tokens, sum(lengths), row_mask.size, distinct, sum(segments.starts)),
            empty_rows=len(tokens) - len(segment_of),
            checksum=crc32(b"".join(x.tobytes() for x in seen)),
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> "FlatBatch":
        """
        Flatten padded rows, with padding on either side of a row or within it. `row_index` keeps their width.

        Args:
            input_ids, attention_mask (`torch.Tensor` of shape `(R, L)`, int64):
                Tokens of the rows, on the CPU, and a mask that is nonzero where they are not padding.
            labels (`torch.Tensor` of shape `(R, L)`, int64, *optional*):
                The token itself where it is scored, else -100. By default, nothing is scored.
            **kwargs:
                Further arguments of [`FlatBatch.from_rows`], such as `prefix_sharing`.
        """
        row_mask = attention_mask != 0
        mask = row_mask.numpy()
        labels = torch.full_like(input_ids, IGNORE_INDEX) if labels is None else labels
        rows, targets = ([row[real] for row, real in zip(x.numpy(), mask, strict=True)] for x in (input_ids, labels))
        batch = cls.from_rows(rows, targets, width=mask.shape[1], **kwargs)
        index = batch.row_index.new_zeros(mask.shape).masked_scatter(row_mask, batch.row_index[batch.row_mask])
        return replace(batch, row_index=index, row_mask=row_mask)

    def to_rows(self) -> list[list[int]]:
        """The rows that the batch was made from. The inverse of [`FlatBatch.from_rows`]."""
        return [row[mask].tolist() for row, mask in zip(self.input_ids[0][self.row_index], self.row_mask, strict=True)]

    def scored_of(self, values: torch.Tensor) -> torch.Tensor:
        """`(1, P, D)`: the vectors of scored tokens in `values`, which is `(1, T, D)` on any device."""
        return values.index_select(1, self.scored_index.to(values.device))

    @torch.compiler.disable  # a graph per dtype, gradient mode and shape would cost more than it saves
    def scored_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """
        `(R, L-1)`: arrange one value per scored token, `(1, P)` of any dtype and device, in rows. Entry `l` of a row
        belongs to the prediction of its token `l+1`. What is not scored, or beyond the end of the row, is 0.
        """
        index, mask, scored = (x.to(values.device) for x in (self.row_index, self.row_mask, self.scored_index))
        flat = values.new_zeros(self.input_ids.size(1)).index_put((scored,), values.squeeze(0))
        # A product would turn inf into NaN
        return flat[index[:, :-1]].masked_fill(~(mask[:, :-1] & mask[:, 1:]), 0)

    def tokens_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """`(R, L, D)`: arrange token vectors, `(1, T, D)` on any device, in rows; 0 at padding."""
        rows = values.squeeze(0)[self.row_index.to(values.device)]
        return torch.where(self.row_mask.to(values.device)[..., None], rows, 0)


def _laid_out(
    tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray], prefix_sharing: bool
) -> tuple[Segments, dict[int, int], np.ndarray, int]:
    """
    The segments of rows; the segment in which each row ends that has tokens; the flat tokens; and how many tokens are
    distinct, whether they are shared or not.
    """
    # A row whose labels are not its own tokens shares nothing: one token would have to predict different ones
    may_share = [((y == IGNORE_INDEX) | (y == x)).all() for x, y in zip(tokens, targets, strict=True)]
    filled = [r for r, row in enumerate(tokens) if len(row)]
    alike, alone = ([r for r in filled if may_share[r] == shares] for shares in (True, False))
    distinct = num_distinct_tokens([tokens[r] for r in alike]) + sum(len(tokens[r]) for r in alone)
    if not prefix_sharing:
        alike, alone = [], filled
    segments, ends, flat = share_prefixes([tokens[r] for r in alike], [tokens[r] for r in alone])
    return segments, dict(zip([*alike, *alone], ends, strict=True)), flat, distinct


def _padding(length: int, multiple: int | None, is_needed: bool) -> int:
    """
    How many tokens of padding follow `length` tokens: what fills the `multiple`. At least one if it `is_needed`: for a
    position that no row reaches, or because the model needs a token even without rows, and every rank must call it.
    """
    tail = -length % multiple if multiple else 0
    return multiple or 1 if is_needed and not tail else tail


# Makes a flat batch of padded `input_ids`, `attention_mask` and `labels`, like [`FlatBatch.from_padded`]
Make = Callable[..., FlatBatch]
