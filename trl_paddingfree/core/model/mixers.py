"""What the core asks of layers that mix tokens otherwise than by attention, such as recurrences. It knows none itself.

A capability answers. Without it, the start-up check refuses models with such layers, as it does those that nobody
knows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
from transformers import PreTrainedModel

from ...capabilities import module_of
from .told import attention_arguments

# How such layers compute shared prefixes: once, from branch to branch of the tree of rows, or again for each row
Way = Literal["tree", "rows"]

Found = TypeVar("Found")


class Mixers:
    """What is known of such layers: here, nothing, as if attention alone mixed tokens."""

    # What carries the layout to a model's layers, given the model, its backend and the context of the pass
    arguments = staticmethod(attention_arguments)

    def found(self, model: PreTrainedModel) -> bool:
        """Whether any layer of `model` mixes tokens otherwise."""
        return False

    def way(self, model: PreTrainedModel) -> Way:
        """How such layers compute shared prefixes if they are free to choose."""
        return "rows"

    def install(self, model: PreTrainedModel, way: Way) -> bool:
        """Have such layers compute flat batches. Returns whether any computes shared prefixes again for each row."""
        return False

    def trains(self, module: torch.nn.Module) -> bool:
        """Whether a module, which has no dropout, is tried in training mode, where it may compute otherwise."""
        return False

    def rounding(self, model: PreTrainedModel) -> Sequence[AbstractContextManager[None]]:
        """Contexts in which padded rows round otherwise than by default, as flat ones may."""
        return ()

    def pads(self, model: PreTrainedModel, way: Way) -> bool:
        """Whether the layers of `model` pad short segments, and keep what they pad."""
        return True

    def heads(self, model: PreTrainedModel) -> tuple[list[str], int | None]:
        """The classes of such layers that need whole rows, sorted; the fewest heads of any other one, or `None`."""
        return [], None

    def describe(self, model: PreTrainedModel) -> str:
        """How such layers are computed, and what would be faster; empty if there are none."""
        return ""


def mixers() -> Mixers:
    """What is known of such layers."""
    recurrent = module_of("recurrent", "mixers")
    return Mixers() if recurrent is None else recurrent.StateLayers()


def rounded_otherwise(model: PreTrainedModel, compute: Callable[[], Found]) -> list[Found]:
    """What `compute` gives in each way in which such layers of `model` round otherwise than by default."""
    found = []
    for otherwise in mixers().rounding(model):
        with otherwise:
            found.append(compute())
    return found


def mixers_of(model: PreTrainedModel) -> Mixers:
    """What passes of `model` ask: for attention alone, nothing of a capability."""
    known = mixers()
    return known if known.found(model) else Mixers()
