"""What attention needs to know about a flat batch, as tensors on one device. Shape legend: see `segments`.

Here and elsewhere, `values` are vectors per token, such as queries, keys and values. `states` are what a recurrence
carries from token to token.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from typing import Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from .segments import PartialSegments, Segments
from .transfer import HasTensors, on_device

# Outputs of attention and, if it returns them, its weights
Attended = tuple[torch.Tensor, torch.Tensor | None]
Derived = TypeVar("Derived")
Arguments = ParamSpec("Arguments")


def once_per_layout(
    make: "Callable[Concatenate[FlatLayout, Arguments], Derived]",
) -> "Callable[Concatenate[FlatLayout, Arguments], Derived]":
    """Cache a function's results in the layout, keyed by its other arguments: all layers of a pass share them."""

    @wraps(make)
    def made(layout, *args, **kwargs):
        return layout.derived((make.__qualname__, *args, *kwargs.items()), partial(make, layout, *args, **kwargs))

    return made


@dataclass(frozen=True)
class GatherIndex(HasTensors):
    """Which row each copy is taken from, and how the gradients of the copies add up. All int64."""

    index: torch.Tensor  # (S,): the row that each copy is taken from, 0 for the `empty` ones
    order: torch.Tensor  # (non-empty copies,): copies sorted by row, the order in which their gradients add up
    offsets: torch.Tensor  # (rows + 1,): where the copies of each row lie in `order`
    empty: torch.Tensor | None = None  # copies of no row, which hold zeros; `None` if there are none

    @classmethod
    def of(cls, index: np.ndarray, num_rows: int) -> "GatherIndex":
        """Derive the tensors, on the CPU. An index of -1 stands for no row."""
        empty = np.flatnonzero(index < 0)
        order = np.argsort(index, kind="stable")[len(empty) :]
        offsets = torch.from_numpy(np.searchsorted(index[order], np.arange(num_rows + 1)))
        places = torch.from_numpy(empty) if len(empty) else None
        return cls(torch.from_numpy(np.maximum(index, 0)), torch.from_numpy(order), offsets, places)


class Gather(torch.autograd.Function):
    """
    Copy rows to where they are needed: `(T, heads, D)` to `(S, heads, D)`. Copies of no row are zeros.

    The gradient of a row is the sum over its copies, accumulated by one kernel in float32 and in a fixed order; the
    backward pass of `index_select` would add bfloat16 numbers in whatever order threads run.
    """

    @staticmethod
    def forward(ctx, values: torch.Tensor, rows: GatherIndex) -> torch.Tensor:
        ctx.rows = rows
        copies = values.index_select(0, rows.index)
        return copies if rows.empty is None else copies.index_fill_(0, rows.empty, 0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        rows, copies = ctx.rows, grad.unsqueeze(-1).flatten(1)
        total = embedding_bag(rows.order, copies, rows.offsets, mode="sum", include_last_offset=True)
        return total.reshape(-1, *grad.shape[1:]), None


def gathered(values: torch.Tensor, rows: GatherIndex | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`(1, heads, T, D)` values as `(S, heads, D)`: copies of `rows`, or all. Casts first, to gather fewer bytes."""
    # `values[0]` would write its gradient into a zeroed copy of all values, a full pass over memory
    values = values.transpose(1, 2).squeeze(0).to(dtype or values.dtype)
    return values if rows is None else Gather.apply(values, rows)


@dataclass(frozen=True)
class FlatLayout(HasTensors):
    """What attention needs from [`Segments`], as tensors on one device, computed once per batch."""

    segments: Segments
    cu_seqlens_q: torch.Tensor  # (N+1,) int32: boundaries of the segments
    cu_seqlens_k: torch.Tensor  # (N+1,) int32: boundaries of the keys that each segment reads
    seq_idx: torch.Tensor  # (1, T) int32: segment of each token, for layers that carry state
    kv_gather: GatherIndex | None  # see `kv_index`
    blocks: torch.Tensor | None = None  # (T,) int64: image block of each token, or -1; tokens of a block see each other

    @classmethod
    def from_segments(cls, segments: Segments, blocks: np.ndarray | None = None) -> "FlatLayout":
        """Derive the tensors, on the CPU."""
        kv_index = segments.kv_index
        seq_idx = np.repeat(np.arange(len(segments.lengths), dtype=np.int32), segments.lengths)
        cu_seqlens_q = torch.from_numpy(segments.cu_seqlens_q)
        return cls(
            segments=segments,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=torch.from_numpy(segments.cu_seqlens_k) if segments.is_shared else cu_seqlens_q,
            seq_idx=torch.from_numpy(seq_idx)[None],
            kv_gather=None if kv_index is None else GatherIndex.of(kv_index, segments.num_keys),
            blocks=None if blocks is None or (blocks < 0).all() else torch.from_numpy(blocks),
        )

    @property
    def kv_index(self) -> torch.Tensor | None:
        """`(S,)` int64: flat position of every key/value row; `None` when nothing is shared."""
        return None if self.kv_gather is None else self.kv_gather.index

    @property
    def host_blocks(self) -> np.ndarray | None:
        """`blocks` on the host. The first access waits for the device."""
        return None if self.blocks is None else self.derived("blocks", self.blocks.cpu).numpy()

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.cu_seqlens_q.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same layout on another device, copied there once."""
        key = torch.device(device)
        return self if key == self.device else self.derived(key, partial(super().to, key, non_blocking))

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """`values` on the layout's device. The host does not wait for the copy."""
        return on_device(torch.from_numpy(values), self.device)

    def gather_index(self, index: np.ndarray, num_rows: int) -> GatherIndex:
        """A [`GatherIndex`] on the layout's device, sent there in one asynchronous copy."""
        return GatherIndex.of(index, num_rows).to(self.device, non_blocking=True)

    def derived(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """The result of `make`, cached per layout and `key`."""
        # Not a field: FSDP rebuilds dataclass arguments of a model from all of their fields
        cache = vars(self).setdefault("_derived", {})
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def without_blocks(self) -> "FlatLayout":
        """The layout for layers in which image tokens see only what precedes them."""
        return self if self.blocks is None else self.derived("without blocks", partial(replace, self, blocks=None))

    @once_per_layout
    def chunked(self, size: int) -> "FlatLayout":
        """The layout for attention within chunks of `size` positions (Llama 4): segments are cut where chunks end."""
        lengths, paths = [], []
        for i, (start, end) in enumerate(zip(self.segments.starts, self.segments.key_lengths, strict=True)):
            for begin, stop in pairwise([start, *range((start // size + 1) * size, end, size), end]):
                lengths.append(stop - begin)
                paths.append(self.segments.path(i)[begin // size * size : stop])
        runs = PartialSegments.of(lengths, paths, self.segments.num_tokens)
        return FlatLayout.from_segments(runs).to(self.device, non_blocking=True)
