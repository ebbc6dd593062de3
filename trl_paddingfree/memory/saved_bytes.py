"""Bytes that autograd keeps of a forward pass, layer by layer: counted, as each tensor is saved."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..model.restored import local_part


class _Saved:
    """The storage of a tensor that autograd saves: the tensor would hold its node, and nothing would ever be freed."""

    def __init__(self, tensor: torch.Tensor):
        self.storage = local_part(tensor).untyped_storage()


class _Record(NamedTuple):
    """A storage that was saved."""

    storage: int
    layer: int  # -1: outside of all
    size: int
    saved: weakref.ref[_Saved]  # dead once autograd has let go of it


class SavedBytes:
    """
    Bytes that a forward pass within [`SavedBytes.counting`] keeps, and no backward pass follows: distinct storages,
    without those of parameters, and of what autograd has let go of. A storage that several layers save, or that all are
    given beside the hidden states (masks, rotary embeddings), belongs to none: it stays whichever of them recompute.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[torch.nn.Module]):
        self.layers = layers
        self.weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.gathered: set[int] = set()  # weights of the layer that is being computed, if they are sharded
        self.current = -1  # the layer that is being computed; -1: none
        self.records: list[_Record] = []
        self.given: list[_Saved] = []  # what layers are given stays for as long as any of them may recompute
        self.inputs = [0] * len(layers)

    def total(self, layer: int) -> int:
        """Bytes that a layer keeps; -1: everything outside of the layers."""
        return sum(size for owner, size in self._storages().values() if owner == layer)

    def largest(self, layer: int) -> int:
        """Bytes of the largest tensor that a layer keeps."""
        return max((size for owner, size in self._storages().values() if owner == layer), default=0)

    def _storages(self) -> dict[int, tuple[int, int]]:
        """Of each storage that is kept: the layer, or -1, and its bytes."""
        found: dict[int, tuple[int, int]] = {}
        for record in self.records:
            if record.saved() is not None:
                known, _ = found.get(record.storage, (record.layer, 0))
                found[record.storage] = (record.layer if known == record.layer else -1), record.size
        return found

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within this context, what is saved is counted."""
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.enter_context(layer.register_forward_pre_hook(partial(self._enter, i), with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(lambda *_: self._leave()))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse))
            yield

    def _enter(self, layer: int, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        for value in (*args[1:], *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.given.append(self._pack(tensor))
        self.current = layer
        self.inputs[layer] = sum(x.numel() * x.element_size() for x in args[:1])  # the hidden states
        self.gathered = {_storage(tensor) for tensor in module.parameters()}

    def _leave(self) -> None:
        self.current, self.gathered = -1, set()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        owner = tensor if tensor._base is None else tensor._base
        storage, saved = _storage(tensor), _Saved(tensor)
        is_weight = storage in self.weights or storage in self.gathered or isinstance(owner, torch.nn.Parameter)
        if not is_weight:
            self.records.append(_Record(storage, self.current, saved.storage.nbytes(), weakref.ref(saved)))
        return saved


def _refuse(saved: _Saved) -> torch.Tensor:
    raise RuntimeError("A pass whose bytes are counted has no backward pass.")


def _storage(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()
