"""As much memory as [`memory`] says, counted by live tensors, and page-locked memory of the host."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .names import NAME


@dataclass
class Memory:
    """The device's memory, in bytes."""

    total: int = 16 * 2**30  # an allocation beyond it fails
    allocated: int = 0  # what live tensors take
    peak: int = 0  # the most that they took, since it was reset
    held: dict[int, tuple[weakref.ref, int]] = field(default_factory=dict)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor for as long as it lives. Raises `torch.OutOfMemoryError` if it is too large."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        reference, before = self.held.get(key, (None, 0))
        if size == before:
            return
        if self.allocated + size - before > self.total:
            raise torch.OutOfMemoryError(
                f"{NAME}: out of memory. Tried to allocate {size} bytes, {self.total - self.allocated} are free."
            )
        self.held[key] = reference or weakref.ref(storage, lambda _: self._release(key)), size
        self.allocated += size - before
        self.peak = max(self.peak, self.allocated)

    def _release(self, key: int) -> None:
        self.allocated -= self.held.pop(key)[1]

    def reset_peak(self, *_: Any) -> None:
        self.peak = self.allocated


memory = Memory()
_pinned: dict[int, weakref.ref] = {}  # page-locked storages of the host


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    storage = copy.untyped_storage()
    key = storage._cdata
    _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return copy
