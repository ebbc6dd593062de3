"""What attention needs to know of a flat batch, as tensors on one device. Shape legend: see `segments`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from .segments import Segments


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
        kv_index (`torch.Tensor` of shape `(S,)`, int64, or `None`):
            Flat position of every key/value row; `None` when nothing is shared.
        kv_copies (`tuple[tuple[torch.Tensor, torch.Tensor], ...]`):
            How the gradients of copied key/value rows add up: the k-th pair of (row, flat position) tensors holds
            the k-th copy of each token. Within one pair no position occurs twice, so the sum has a fixed order.
    """

    segments: Segments
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_idx: torch.Tensor
    kv_index: torch.Tensor | None
    kv_copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    _masks: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_segments(cls, segments: Segments) -> "FlatLayout":
        """Derive the tensors, on the CPU."""
        kv_index, copies = segments.kv_index, []
        if kv_index is not None:
            order = np.argsort(kv_index, kind="stable")
            sorted_index = kv_index[order]
            first = np.flatnonzero(np.diff(sorted_index, prepend=-1))
            copy = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
            for k in range(int(copy.max()) + 1):
                rows = order[copy == k]
                copies.append((torch.from_numpy(rows), torch.from_numpy(kv_index[rows])))
        seq_idx = np.repeat(np.arange(len(segments.lengths), dtype=np.int32), segments.lengths)
        return cls(
            segments=segments,
            cu_seqlens_q=torch.from_numpy(segments.cu_seqlens_q),
            cu_seqlens_k=torch.from_numpy(segments.cu_seqlens_k),
            seq_idx=torch.from_numpy(seq_idx)[None],
            kv_index=None if kv_index is None else torch.from_numpy(kv_index),
            kv_copies=tuple(copies),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "FlatLayout":
        """The same layout on another device."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "FlatLayout":
        """The same layout in page-locked memory."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "FlatLayout":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: fn(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        copies = tuple((fn(rows), fn(positions)) for rows, positions in self.kv_copies)
        return replace(self, **moved, kv_copies=copies, _masks={})

    def segment_mask(self, i: int, window: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """
        `(1, 1, length, start + length)` mask of segment `i`, made once per batch and shared by all layers.

        Args:
            i (`int`):
                Index of the segment.
            window (`int`, *optional*):
                Number of positions that each query sees, itself included. All, if `None`.
            dtype (`torch.dtype`, *optional*):
                If set, a mask of this dtype to add to the scores. Otherwise a boolean mask, or `None` where plain
                causal attention is the same.
        """
        start, length = self.segments.starts[i], self.segments.lengths[i]
        window = window if window is not None and window < start + length else None
        if start == 0 and window is None and dtype is None:
            return None
        key = (start, length, window, dtype)
        if key not in self._masks:
            q = torch.arange(start, start + length, device=self.cu_seqlens_q.device)[:, None]
            k = torch.arange(start + length, device=self.cu_seqlens_q.device)[None]
            mask = k <= q if window is None else (k <= q) & (k > q - window)
            if dtype is not None:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
            self._masks[key] = mask[None, None]
        return self._masks[key]
