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
    """What autograd gets to save in place of a tensor: its storage. A tensor would keep its graph alive forever."""

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
    Bytes that autograd still holds after a forward pass within [`SavedBytes.counting`], which no backward pass follows:
    of distinct storages, without parameters. A storage that several layers save, or get as another argument than hidden
    states (masks, rotary embeddings), counts as outside of the layers: it stays, whichever of them recompute.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[torch.nn.Module]):
        self.layers = layers
        self.weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.gathered: set[int] = set()  # weights of the layer that is being computed, if they are sharded
        self.current = -1  # the layer that is being computed; -1: none
        self.records: list[_Record] = []
        self.arguments: list[_Saved] = []  # other arguments of layers, which stay as long as any layer may recompute
        self.inputs = [0] * len(layers)  # bytes of the hidden states that each layer gets

    def total(self, layer: int) -> int:
        """Bytes that a layer keeps; -1: everything outside of the layers."""
        return sum(size for owner, size in self._storages().values() if owner == layer)

    def largest(self, layer: int) -> int:
        """Bytes of the largest tensor that a layer keeps."""
        return max((size for owner, size in self._storages().values() if owner == layer), default=0)

    def _storages(self) -> dict[int, tuple[int, int]]:
        """Of each storage that is kept: the layer, or -1, and its bytes."""
        storages: dict[int, tuple[int, int]] = {}
        for record in self.records:
            if record.saved() is not None:
                layer, _ = storages.get(record.storage, (record.layer, 0))
                storages[record.storage] = (record.layer if layer == record.layer else -1), record.size
        return storages

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
                    self.arguments.append(self._pack(tensor))
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
