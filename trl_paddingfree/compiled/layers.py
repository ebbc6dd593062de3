"""Decoder layers compiled one by one: each kind is compiled once, for all its layers, lengths and micro-batches.

The compiled code lies inside the checkpoint of a layer, so recomputation and slices stay outside. Calls without a flat
batch, such as generation, stay eager, and so does attention, whose layout changes from batch to batch.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ..core import upstream
from ..core.check.again import Variation
from ..core.flat.batch import FlatBatch
from ..core.model.backends import ATTENTION_BACKENDS
from ..core.model.flat_model import ATTRIBUTE, FlatModel
from ..core.model.hooks import PassHook
from ..core.model.told import FlatMask
from ..recomputable import recomputable_layers

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.get_logger(__name__)

CompilerOptions: TypeAlias = dict[str, Any]  # arguments of [`torch.compile`]

# Layers of one class differ in what the compiler guards on: mode, window, adapters, and the strides of slices. Beyond
# its default limit of 8 variants, the compiler falls back to eager code and only logs it
_MOST_VARIANTS = 64
# The attribute of a plugin that compiles nothing: the one that it stands in for
_TAKEN = "taken"


def taken_from(accelerator: "Accelerator") -> CompilerOptions | None:
    """
    The compiler options that an `accelerator` got from `torch_compile=True` or its launcher; `None` without. Turns its
    own compilation off, which would compile the whole model, in pieces.
    """
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    state = accelerator.state  # shared by all accelerators that are made before the next configuration
    plugin = vars(state.dynamo_plugin).get(_TAKEN, state.dynamo_plugin)
    if plugin.backend == DynamoBackend.NO:
        return None
    state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    vars(state.dynamo_plugin)[_TAKEN] = plugin
    given = plugin.to_kwargs()
    return {name: given[name] for name in ("backend", "mode", "options") if given.get(name) is not None}


def make_eager(model: PreTrainedModel) -> None:
    """Make the decoder layers of a model eager again, unless an engine has made classes of its own of compiled ones."""
    for layer in recomputable_layers(model):
        if _Compiled in (bases := type(layer).__bases__):
            layer.__class__ = bases[0]
    if (flat_model := vars(model).get(ATTRIBUTE)) is not None:
        flat_model.hooks = tuple(hook for hook in flat_model.hooks if not isinstance(hook, _TracedFunctions))


def compile_layers(flat_model: FlatModel, options: CompilerOptions, says: bool = True) -> None:
    """
    Compile the decoder layers of a model for flat batches, with `options` of [`torch.compile`]. Compilation happens in
    the first passes. Layers that cannot be compiled stay eager, and a warning says why if `says`.

    Raises:
        `ValueError`: If the backend keeps the model's own attention, so that layers cannot tell flat batches from
        others, or if several processes compute each batch together.
    """
    _refuse(flat_model)
    make_eager(model := flat_model.model)
    layers = recomputable_layers(model)
    upstream.configure_compiler(_MOST_VARIANTS)
    flat_model.hooks += (_TracedFunctions(options),)
    reasons = []
    for layer in layers:
        if isinstance(layer, _Compiled):  # under a class that an engine has made
            continue
        if reason := _why_eager(layer):
            reasons.append(reason)
        else:
            layer.__class__ = _compiled_class(type(layer), options)
    if says and (reasons or not layers):
        number = f"{len(reasons)} of {len(layers)} layers of {type(model).__name__}"
        why = "; ".join(dict.fromkeys(reasons)) or "transformers puts no checkpoints around any"
        logger.warning(f"`torch_compile=True`: {number} stay eager, because {why}.")


def compiled(flat_model: FlatModel, options: CompilerOptions) -> Variation:
    """
    How the check proves compiled layers: it computes a flat batch before layers are compiled, and then with them, and
    leaves them eager. The reference so has whatever is on the class of layers.

    Raises:
        `ValueError`: As [`compile_layers`].
    """
    _refuse(flat_model)

    @contextmanager
    def compiling(batch: FlatBatch) -> Iterator[FlatBatch]:
        compile_layers(flat_model, options, says=False)  # the check leaves out layers, whose forwards it replaces
        try:
            with torch.compiler.set_stance("default"):  # the check computes by eager code otherwise
                yield batch
        finally:
            make_eager(flat_model.model)

    return Variation(
        name="Compiled layers",
        differs="flat batches by compiled code differently from eager ones",
        options="`torch_compile`",
        vary=compiling,
        narrows=False,  # narrowed windows would be compiled separately
        lasts=False,  # another compiler may compile otherwise
    )


def _refuse(flat_model: FlatModel) -> None:
    """Refuse models whose layers cannot tell flat batches from others, and batches that processes share."""
    model, backend = flat_model.model, flat_model.route.backend
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(
            f"`torch_compile=True`: {type(model).__name__} computes flat batches by `{backend}`, whose layers are not "
            f"compiled. Leave it out, or set `flat_attention` to one of {', '.join(ATTENTION_BACKENDS)}."
        )
    if flat_model.peers.name:
        raise ValueError("`torch_compile=True`: exchanges between processes cannot be compiled. Leave it out.")


def _why_eager(layer: GradientCheckpointingLayer) -> str:
    """Why a layer cannot be compiled; empty if it can."""
    if "forward" in vars(layer):
        return "something has replaced their forward, such as hooks that move weights"
    if upstream.layer_forward(type(layer)) is None:
        return f"something has replaced or wrapped the forward of their class, {type(layer).__name__}"
    if any("parameter_name" in vars(module) for module in layer.modules()):
        return "PEFT's adapters of expert weights change the class of a module in each call"
    return ""


class _TracedFunctions(PassHook):
    """
    Has layers compiled again if functions of the classes of their modules were replaced, by which a compiler does not
    ask: it takes those of a class for constant.
    """

    def __init__(self, options: CompilerOptions):
        self.options = options

    def begin(self, flat_model: FlatModel, batch: FlatBatch) -> FlatBatch:
        now = _functions(recomputable_layers(flat_model.model))
        if changed := [each for each, functions in now.items() if _TRACED.get(each, functions) != functions]:
            names = sorted(each.__name__ for each in changed if not issubclass(each, _Compiled))
            logger.warning(
                f"`torch_compile=True`: functions of {', '.join(names)} were replaced after layers were compiled: "
                "the layers are compiled again."
            )
            torch.compiler.reset()  # what layers call is kept beside them, and has no name by which to drop it
            _TRACED.clear()
            compile_layers(flat_model, self.options)
        _TRACED.update(now)
        return batch


# The functions of classes with which layers were compiled, of all models: compiled code is kept by function
_TRACED: dict[type, dict[str, object]] = {}
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)


def _functions(layers: Iterable[torch.nn.Module]) -> dict[type, dict[str, object]]:
    """The functions of all classes that modules of `layers` have, by class and name."""
    kinds = {type(module) for layer in layers for module in layer.modules()}
    classes = {base for kind in kinds for base in kind.__mro__}
    return {each: {name: x for name, x in vars(each).items() if isinstance(x, _FUNCTIONS)} for each in classes}


class _Compiled:
    """Marks classes of layers that are compiled."""


# Keyed by the class of the layers, its forward, and their compiler options
_CLASSES: dict[tuple[type, Callable, str], type] = {}


def _compiled_class(eager: type[GradientCheckpointingLayer], options: CompilerOptions) -> type:
    """
    A subclass of `eager` whose forward is compiled. A forward set on an instance would have no checkpoint, because
    transformers wraps the forward of each layer class.
    """
    known: Callable = eager.forward
    if (key := (eager, known, repr(options))) in _CLASSES:
        return _CLASSES[key]
    forward = upstream.layer_forward(eager)
    assert forward is not None
    compiled = torch.compile(forward, dynamic=True, **options)

    @functools.wraps(forward)
    def compiled_if_flat(self, *args, **kwargs):
        # The class may have got another forward, which then is the one to call
        is_flat = any(isinstance(value, FlatMask) for value in (*args, *kwargs.values())) and eager.forward is known
        return (compiled if is_flat else eager.forward)(self, *args, **kwargs)

    def reduce(self, protocol):  # copies and pickled models are eager
        return object.__new__, (eager,), *eager.__reduce_ex__(self, protocol)[2:]

    members = {
        "forward": compiled_if_flat,
        "__reduce_ex__": reduce,
        "__module__": eager.__module__,
        "__qualname__": eager.__qualname__,
    }
    return _CLASSES.setdefault(key, type(eager.__name__, (eager, _Compiled), members))
