"""Bytes of the keys and values that attention reads, noted while the layers of a model are counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..core.flat.layout import Attended, FlatLayout
from ..core.model.flat_model import FlatModel
from ..core.model.hooks import PassHook
from ..core.model.restored import attributes_set
from ..core.model.told import Around, PassContext
from ..spans import NO_WINDOW


class KeysNoted(PassHook):
    """Notes layer, window, and bytes of keys and values of each attention call, of this process's heads."""

    def __init__(self) -> None:
        self.noted: list[tuple[torch.nn.Module, int, int]] = []

    def context(self, context: PassContext) -> PassContext:
        return replace(context, around=(*context.around, self.note))

    def note(self, attend: Around, layout: FlatLayout, layer, module, query, key, value, **kwargs) -> Attended:
        self.noted.append((layer, kwargs.get("sliding_window") or NO_WINDOW, key.nbytes + value.nbytes))
        return attend(layout, layer, module, query, key, value, **kwargs)


@contextmanager
def keys_noted(model: PreTrainedModel) -> Iterator[list[tuple[torch.nn.Module, int, int]]]:
    """Within this context, the list collects what [`KeysNoted`] notes of the passes of a model."""
    flat_model, hook = FlatModel.of(model), KeysNoted()
    assert flat_model is not None
    with attributes_set([(flat_model, "hooks", (*flat_model.hooks, hook))]):
        yield hook.noted
