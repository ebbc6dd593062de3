"""What attention needs to know of a flat batch, as tensors on one device. Shape legend: see `segments`."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from .segments import Segments


@dataclass(frozen=True)
class RowIndex:
    """
    Where copies of rows come from, and where their gradients add up.

    Args:
        index (`torch.Tensor` of shape `(S,)`, int64):
            The row that each copy is of.
        order (`torch.Tensor` of shape `(S,)`, int64):
            The copies sorted by row, in which their gradients add up.
        offsets (`torch.Tensor` of shape `(rows + 1,)`, int64):
            Where the copies of each row lie in `order`.
    """

    index: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, index: np.ndarray, num_rows: int) -> "RowIndex":
        """Derive the tensors, on the CPU."""
        order = np.argsort(index, kind="stable")
        offsets = np.searchsorted(index[order], np.arange(num_rows + 1))
        return cls(torch.from_numpy(index), torch.from_numpy(order), torch.from_numpy(offsets))

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "RowIndex":
        """The same with `fn` of each tensor."""
        return RowIndex(fn(self.index), fn(self.order), fn(self.offsets))


@dataclass(frozen=True)
class FlatLayout:
    """
    What attention needs of [`Segments`], as tensors on one device, computed once per batch.

    Args:
        segments (`Segments`):
            The cut of the flat axis, on the host.
        cu_seqlens_q (`torch.Tensor` of shape `(N+1,)`, int32):
            Boundaries of the query runs.
        cu_seqlens_k (`torch.Tensor` of shape `(N+1,)`, int32):
            Boundaries of the keys of each query run.
        seq_idx (`torch.Tensor` of shape `(1, T)`, int32):
            Segment of each token, for layers that carry state.
        kv_rows (`RowIndex`, *optional*):
            Flat position of every key/value row; `None` when nothing is shared.
        blocks (`torch.Tensor` of shape `(T,)`, int64, *optional*):
            The image block of each token, all of whose tokens see one another, or -1. `None`, if attention is causal.
    """

    segments: Segments
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_idx: torch.Tensor
    kv_rows: RowIndex | None
    blocks: torch.Tensor | None = None
    _derived: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_segments(cls, segments: Segments, blocks: np.ndarray | None = None) -> "FlatLayout":
        """Derive the tensors, on the CPU."""
        kv_index = segments.kv_index
        seq_idx = np.repeat(np.arange(len(segments.lengths), dtype=np.int32), segments.lengths)
        return cls(
            segments=segments,
            cu_seqlens_q=torch.from_numpy(segments.cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(segments.cu_seqlens_k),
            seq_idx=torch.from_numpy(seq_idx)[None],
            kv_rows=None if kv_index is None else RowIndex.of(kv_index, segments.num_tokens),
            blocks=None if blocks is None or (blocks < 0).all() else torch.from_numpy(blocks),
        )

    @property
    def kv_index(self) -> torch.Tensor | None:
        """`(S,)` int64: flat position of every key/value row; `None` when nothing is shared."""
        return None if self.kv_rows is None else self.kv_rows.index

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.cu_seqlens_q.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "FlatLayout":
        """The same layout on another device, copied there once."""
        key = torch.device(device)
        if key == self.device:
            return self
        return self.derived(key, lambda: self._map(lambda x: x.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> "FlatLayout":
        """The same layout in page-locked memory."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "FlatLayout":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: fn(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        if self.kv_rows is not None:
            moved["kv_rows"] = self.kv_rows.map(fn)
        return replace(self, **moved, _derived={})

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """`values` on the layout's device. The host does not wait for the copy."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once per layout and `key`: all layers of a forward pass share it."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def without_blocks(self) -> "FlatLayout":
        """The layout of layers in which image tokens see only what precedes them."""
        if self.blocks is None:
            return self
        return self.derived("without blocks", lambda: replace(self, blocks=None, _derived={}))

    def chunked(self, size: int) -> "FlatLayout":
        """
        The layout of layers in which tokens attend within chunks of `size` positions, as in Llama 4: no kernel needs to
        know of chunks, because each segment is cut where a chunk of its row ends.
        """

        def cut() -> FlatLayout:
            return FlatLayout.from_segments(_cut_at_chunks(self.segments, size)).to(self.device, non_blocking=True)

        return self.derived(("chunked", size), cut)


def _cut_at_chunks(segments: Segments, size: int) -> Segments:
    """Cut segments where their positions pass a multiple of `size`, and let each piece continue only its own chunk."""
    lengths: list[int] = []
    parents: list[int] = []
    starts: list[int] = []
    first_piece: list[int] = []
    for length, parent, start in zip(segments.lengths, segments.parents, segments.starts, strict=True):
        first_piece.append(len(lengths))
        while parent != -1 and segments.starts[parent] >= start:
            parent = segments.parents[parent]
        ends = [*range((start // size + 1) * size, start + length, size), start + length]
        for begin, end in zip([start, *ends], ends, strict=False):
            within = begin % size
            holder = first_piece[parent] + (begin - 1) // size - segments.starts[parent] // size
            lengths.append(end - begin)
            parents.append(holder if within else -1)
            starts.append(within)
    return Segments(tuple(lengths), tuple(parents), tuple(starts))
