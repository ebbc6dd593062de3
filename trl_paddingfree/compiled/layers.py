"""Decoder layers compiled one by one: each kind is compiled once, for all its layers, lengths and micro-batches.

The compiled code lies inside the checkpoint of a layer, so recomputation and slices stay outside. Calls without a flat
batch, such as generation, stay eager, and so does attention, whose layout changes from batch to batch.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..core import upstream
from ..core.check.again import Variation
from ..core.flat.batch import FlatBatch
from ..core.model.architecture import recomputable_layers
from ..core.model.attention import ATTENTION_BACKENDS
from ..core.model.flat_model import FlatModel
from ..core.model.told import FlatMask

logger = logging.get_logger(__name__)

# Arguments of [`torch.compile`]
CompilerOptions: TypeAlias = dict[str, Any]

# Layers of one class differ in what the compiler guards on: mode, window, adapters, and the strides of slices. Beyond
# its default limit of 8 variants, the compiler falls back to eager code and only logs it
_MOST_VARIANTS = 64


@contextmanager
def _compiling(batch: FlatBatch) -> Iterator[FlatBatch]:
    with torch.compiler.set_stance("default"):  # the check computes by eager code otherwise
        yield batch


COMPILED = Variation(
    name="Compiled layers",
    differs="flat batches by compiled code differently from eager ones",
    options="`torch_compile`",
    vary=_compiling,
    narrows=False,  # narrowed windows would be compiled separately
)


def taken_from(accelerator: Accelerator) -> CompilerOptions:
    """
    The compiler options that an `accelerator` got from `torch_compile=True` or its launcher. Turns its own compilation
    off, which would compile the whole model, in pieces.
    """
    plugin = accelerator.state.dynamo_plugin
    accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    given = plugin.to_kwargs()
    return {name: given[name] for name in ("backend", "mode", "options") if given.get(name) is not None}


def compile_layers(flat_model: FlatModel, options: CompilerOptions | None) -> None:
    """
    Compile the decoder layers of a model for flat batches, with `options` of [`torch.compile`], or make them eager
    again if `None`. Compilation happens in the first passes. Layers that cannot be compiled stay eager, and a warning
    says why.

    Raises:
        `ValueError`: If the backend keeps the model's own attention, so that layers cannot tell flat batches from
        others, or if several processes compute each batch together.
    """
    model, backend = flat_model.model, flat_model.route.backend
    layers = recomputable_layers(model)
    for layer in layers:
        if _Compiled in (bases := type(layer).__bases__):
            layer.__class__ = bases[0]
    if options is None:
        return
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(
            f"`torch_compile=True`: {type(model).__name__} computes flat batches by `{backend}`, whose layers are not "
            f"compiled. Leave it out, or set `flat_attention` to one of {', '.join(ATTENTION_BACKENDS)}."
        )
    if flat_model.peers.name:
        raise ValueError("`torch_compile=True`: what processes exchange is not compiled. Leave it out.")
    upstream.configure_compiler(_MOST_VARIANTS)
    reasons = []
    for layer in layers:
        if reason := _why_eager(layer):
            reasons.append(reason)
        else:
            layer.__class__ = _compiled_class(type(layer), options)
    if reasons or not layers:
        number = f"{len(reasons)} of {len(layers)} layers of {type(model).__name__}"
        why = "; ".join(dict.fromkeys(reasons)) or "transformers puts no checkpoints around any"
        logger.warning(f"`torch_compile=True`: {number} stay eager, because {why}.")


def _why_eager(layer: GradientCheckpointingLayer) -> str:
    """Why a layer cannot be compiled; empty if it can."""
    if "forward" in vars(layer):
        return "something has replaced their forward, such as hooks that move weights"
    if any("parameter_name" in vars(module) for module in layer.modules()):
        return "PEFT's adapters of expert weights change the class of a module in each call"
    return ""


class _Compiled:
    """Marks classes of layers that are compiled."""


# Keyed by the class of the layers and their compiler options
_CLASSES: dict[tuple[type, str], type] = {}


def _compiled_class(eager: type[GradientCheckpointingLayer], options: CompilerOptions) -> type:
    """
    A subclass of `eager` whose forward is compiled. A forward set on an instance would have no checkpoint, because
    transformers wraps the forward of each layer class.
    """
    if (key := (eager, repr(options))) in _CLASSES:
        return _CLASSES[key]
    # transformers 5.24 puts the checkpoint around `forward`, 5.20 around `__call__`
    has_checkpoint = "__init_subclass__" in vars(GradientCheckpointingLayer)
    forward = eager.forward.__wrapped__ if has_checkpoint else eager.forward  # type: ignore[attr-defined]
    compiled = torch.compile(forward, dynamic=True, **options)

    @functools.wraps(forward)
    def compiled_if_flat(self, *args, **kwargs):
        is_flat = any(isinstance(value, FlatMask) for value in (*args, *kwargs.values()))
        return (compiled if is_flat else forward)(self, *args, **kwargs)

    def reduce(self, protocol):  # copies and pickled models are eager
        return object.__new__, (eager,), *eager.__reduce_ex__(self, protocol)[2:]

    members = {
        "forward": compiled_if_flat,
        "__reduce_ex__": reduce,
        "__module__": eager.__module__,
        "__qualname__": eager.__qualname__,
    }
    return _CLASSES.setdefault(key, type(eager.__name__, (eager, _Compiled), members))
