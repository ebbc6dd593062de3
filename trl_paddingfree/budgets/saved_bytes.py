"""Counts the bytes that autograd keeps of a forward pass, layer by layer, as each tensor is saved."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..core.model.restored import local_part


class _Saved:
    """What autograd saves in place of a tensor: its storage. The tensor would keep its graph alive forever."""

    def __init__(self, tensor: torch.Tensor):
        self.storage = local_part(tensor).untyped_storage()
        self.pointer, self.nbytes = self.storage.data_ptr(), self.storage.nbytes()  # sharded weights are freed


class SavedBytes:
    """
    Bytes that autograd still holds after a forward pass within [`SavedBytes.counting`], without a backward pass: of
    distinct storages, except parameters and buffers. A storage that several layers save, or get as an argument other
    than hidden states (masks, rotary embeddings), counts as outside of the layers: it stays, whichever recompute.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[torch.nn.Module]):
        self.layers = layers
        self.weights = {_Saved(tensor).pointer for tensor in (*model.parameters(), *model.buffers())}
        self.gathered: set[int] = set()  # weights of the layer that is being computed, if they are sharded
        self.current = -1  # the layer that is being computed; -1: none
        self.saved: WeakKeyDictionary[_Saved, int] = WeakKeyDictionary()  # the layer of what autograd still holds
        self.arguments: list[_Saved] = []  # other arguments of layers, which stay as long as any layer may recompute
        self.inputs = [0] * len(layers)  # bytes of the hidden states that each layer gets

    def sizes(self, layer: int) -> list[int]:
        """Bytes of each storage that a layer keeps; -1: outside of the layers."""
        owners = defaultdict(set)
        for saved, owner in self.saved.items():
            owners[saved.pointer, saved.nbytes].add(owner)
        return [nbytes for (_, nbytes), of in owners.items() if (of if len(of) == 1 else {-1}) == {layer}]

    def total(self, layer: int) -> int:
        """Bytes that a layer keeps; -1: everything outside of the layers."""
        return sum(self.sizes(layer))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within this context, count what autograd saves."""
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.enter_context(layer.register_forward_pre_hook(partial(self._enter, i), with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(self._leave))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse))
            yield

    def _enter(self, layer: int, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        for value in (*args[1:], *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if torch.is_tensor(tensor):
                    self.arguments.append(self._pack(tensor))
        self.current = layer
        self.inputs[layer] = sum(x.nbytes for x in args[:1])  # the hidden states
        self.gathered = {_Saved(tensor).pointer for tensor in module.parameters()}

    def _leave(self, *_: object) -> None:
        self.current, self.gathered = -1, set()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter)
        if not is_weight and saved.pointer not in self.weights | self.gathered:
            self.saved[saved] = self.current
        return saved


def _refuse(saved: _Saved) -> torch.Tensor:
    raise RuntimeError("A pass whose bytes are counted has no backward pass.")
