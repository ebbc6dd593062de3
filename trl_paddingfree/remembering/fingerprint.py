"""
A key for what a verdict of the start-up check depends on: a model's code, settings and shapes, and its surroundings.

Two models have the same key if they run the same code on tensors of the same shapes and dtypes, with the same settings
and hooks. Values of trained weights do not count. What cannot be told by value (a lock, a foreign object of C++) has no
key, and is checked again. What the key cannot see stands in docs/limits.md.
"""

import hashlib
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..core import upstream
from ..core.model.flat_model import ATTRIBUTE, FlatModel
from ..core.model.restored import local_part
from ..machine import accelerators, package_versions

_PACKAGE = Path(__file__).parents[1]
# Packages whose version is in the key: of their objects, what cannot be told by value is told by its type
_OF_KNOWN_VERSION = {
    "accelerate", "bitsandbytes", "deepspeed", "flash_attn", "liger_kernel", "numpy", "peft", "torch", "transformers",
    "trl", _PACKAGE.name,
}  # fmt: skip
# Where packages are installed
_INSTALLED = {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")}
# Functions of these are compared, but not what they call
_LEAVES = {"bitsandbytes", "deepspeed", "flash_attn", "numpy", "torch", *sys.stdlib_module_names}
# Attributes that change nothing that a model computes: names, places in files, what is told on its own, and ours
_PASSING = {
    *(name for name in vars(torch.nn.Module()) if "hooks" not in name), "generation_config", "transformers_version",
    "warnings_issued", ATTRIBUTE,
}  # fmt: skip
_VALUES = bool | int | float | complex | str | bytes | torch.dtype | torch.Size | torch.layout | torch.memory_format
# The module of locks, which compute nothing
_LOCKS = type(threading.Lock()).__module__
# The most entries of a tensor beside the weights (tables, masks, scales) that count by value; of larger ones, the shape
_WHOLE = 2**22
# The most objects that are looked at: more would be data, not settings
_MOST = 500_000


class UntoldError(Exception):
    """An object whose behavior cannot be told by value."""


def _root(x: object) -> str:
    """The package that a function or type comes from."""
    return str(getattr(x, "__module__", None) or "").partition(".")[0]


def _is_users(function: FunctionType) -> bool:
    """Whether a function is of a user's own file: no package was installed with it, and nothing has generated it."""
    file = function.__code__.co_filename
    return _root(function) not in _OF_KNOWN_VERSION and not file.startswith(("<", *_INSTALLED))


def _is_passing(name: str) -> bool:
    """Whether an attribute changes nothing that a model computes; hooks on states of checkpoints do not."""
    return name in _PASSING or "state_dict" in name or name.endswith(("name_or_path", "commit_hash"))


class Fingerprint:
    """Collects what is told of objects into one digest."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        # By id, the place and the object, which is kept alive, so that no id comes twice
        self.seen: dict[int, tuple[int, object]] = {}
        self.classes = set[tuple]()
        self.functions = dict[tuple, FunctionType]()

    def hexdigest(self) -> str:
        """The digest of all that was added so far."""
        return self.digest.hexdigest()

    def say(self, *words: object) -> None:
        """Add words and other plain values."""
        self.digest.update(repr(words).encode())

    def _is_new(self, x: object) -> bool:
        if id(x) in self.seen:
            self.say("again", self.seen[id(x)][0])
            return False
        if len(self.seen) > _MOST:
            raise UntoldError("too many objects")
        self.seen[id(x)] = len(self.seen), x
        return True

    # --- objects ----------------------------------------------------------------------------------------------------

    def add(self, x: Any) -> None:
        """Add any object by value."""
        if x is None or isinstance(x, _VALUES | np.generic):
            self.say(repr(x))
        elif isinstance(x, Enum):
            self.say(type(x).__qualname__, x.name)
        elif isinstance(x, torch.device):
            self.say(x.type)
        elif isinstance(x, type):
            self.say(x.__module__, x.__qualname__)
        elif isinstance(x, ModuleType):
            self.say(x.__name__)
        elif not self._is_new(x):
            pass
        elif torch.is_tensor(x):
            self._add_tensor(x)
        elif isinstance(x, torch.nn.Module):
            self.add_modules(x)
        elif isinstance(x, FunctionType):
            self.add_function(x)
        elif isinstance(x, MethodType):
            self.add_function(x.__func__)
            self.add(x.__self__)
        elif isinstance(x, BuiltinFunctionType):
            self.say(x.__module__, x.__qualname__)
        elif isinstance(x, partial):
            self._add_all(x.func, x.args, x.keywords)
        elif isinstance(x, weakref.ReferenceType):
            self.add(x())
        elif isinstance(x, Mapping):
            self.say(type(x).__qualname__, len(x))
            self._add_all(*(entry for pair in x.items() for entry in pair))
        elif isinstance(x, list | tuple):
            self.say(type(x).__qualname__, len(x))
            self._add_all(*x)
        elif isinstance(x, set | frozenset):
            self.say("set", len(x))
            self._add_all(*sorted(x, key=repr))
        else:
            self._add_object(x)

    def _add_all(self, *objects: object) -> None:
        for x in objects:
            self.add(x)

    def _add_object(self, x: Any) -> None:
        self.say(type(x).__module__, type(x).__qualname__)
        if hasattr(x, "__wrapped__"):  # as of `functools.cache`
            self.add(x.__wrapped__)
        elif isinstance(x, RemovableHandle) or _root(type(x)) in (
            "torch",
            "logging",
        ):  # engines keep streams and groups
            pass
        elif hasattr(x, "__dict__"):
            self._add_attributes(x)
            if callable(x):
                self.add_class(type(x), "__call__")
        elif " at 0x" not in (said := repr(x)):
            self.say(said)
        elif type(x) is not object and _root(type(x)) not in {*_OF_KNOWN_VERSION, _LOCKS}:  # no mark of its own
            raise UntoldError(f"{type(x).__module__}.{type(x).__qualname__}")

    def _add_attributes(self, x: object) -> None:
        is_config = isinstance(x, PreTrainedConfig)
        for name, value in sorted(vars(x).items()):
            if _is_passing(name) or (is_config and "attn_implementation" in name):  # the route says it
                continue
            self.say(name)
            self.add(value)

    def _add_tensor(self, x: torch.Tensor) -> None:
        local = local_part(x.detach())
        self.say(type(x).__qualname__, tuple(x.shape), str(x.dtype), x.device.type, x.requires_grad)
        self.add(upstream.gradient_hooks(x))
        if isinstance(x, torch.nn.Parameter):
            self._add_attributes(x)
            # What frozen weights of zero hide shows once they are others. Those that train are moved for the check
            if not x.requires_grad and local.is_floating_point() and local.dtype.itemsize > 1 and local.numel():
                self.say(bool(local.any()))
        elif local.numel() <= _WHOLE and local.device.type != "meta" and not local.is_quantized:
            self.digest.update(local.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    # --- modules ----------------------------------------------------------------------------------------------------

    def add_modules(self, root: torch.nn.Module) -> None:
        """Add all modules within one: their code, their attributes with hooks, and the shapes of their tensors."""
        for module in root.modules():
            self.seen.setdefault(id(module), (len(self.seen), module))
        for name, module in root.named_modules():
            self.say(name)
            self.add_class(type(module), "forward", "__call__")
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for own_name, tensor in tensors:
                self.say(own_name)
                self.add(tensor)
            flat = vars(module).get(ATTRIBUTE)
            attributes = dict(vars(module))
            if isinstance(flat, FlatModel):  # what an earlier check has put into it
                attributes.pop("forward", None)
                self.add(flat.forwards)
            for own_name, value in sorted(attributes.items()):
                if not _is_passing(own_name):
                    self.say(own_name)
                    self.add(value)

    def add_wrappers(self, call: torch.nn.Module, model: torch.nn.Module) -> None:
        """
        Add what `call` has around `model`: the code and hooks of wrappers, their attributes if no package of known
        version has made them, and all modules beside the model, such as a head of values.
        """
        within = {*model.modules()}
        for module in call.modules():
            if module in within:
                continue
            if within.isdisjoint(module.modules()):
                self.add(module)
                continue
            self.add_class(type(module), "forward", "__call__")
            self.say(sorted(name for name, value in vars(module).items() if "hooks" in name and value))
            if _root(type(module)) not in _OF_KNOWN_VERSION:
                self._add_attributes(module)
                self._add_all(*module.parameters(recurse=False), *module.buffers(recurse=False))
            elif "forward" in vars(module):
                self.add(vars(module)["forward"])

    # --- code -------------------------------------------------------------------------------------------------------

    def add_class(self, owner: type, *names: str) -> None:
        """Add the code of a class: its methods of these names, and what they reach."""
        self.say(owner.__module__, owner.__qualname__, [base.__qualname__ for base in owner.__mro__])
        if (owner, names) not in self.classes:
            self.classes.add((owner, names))
            for name in names:
                self._add_method(owner, name)

    def _add_method(self, owner: type, name: str) -> None:
        for base in owner.__mro__:
            if name in vars(base):
                found = vars(base)[name]
                found = getattr(found, "fget", None) or getattr(found, "__func__", found)
                if isinstance(found, FunctionType):
                    self.add_function(found, owner)
                elif isinstance(found, partial) or hasattr(found, "__wrapped__"):
                    self.add(found)
                return

    def add_function(self, function: Any, owner: type | None = None, depth: int = 0) -> None:
        """Add the code of a function, what it holds, and the functions and methods of `owner` that it names."""
        if not isinstance(function, FunctionType):
            self.add(function)
            return
        if (key := (id(function), owner)) in self.functions:
            return
        self.functions[key] = function
        self.say(function.__module__, function.__qualname__)
        names = self._add_code(function.__code__)
        is_leaf = _root(function) in _LEAVES
        if depth and is_leaf:
            return
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                self.say("empty")
                continue
            # A method that a decorator wraps calls others of its class, too
            self.add_function(held, owner) if isinstance(held, FunctionType) else self.add(held)
        if not is_leaf:
            self._add_all(function.__defaults__, function.__kwdefaults__)
            if owner is not None and _root(owner) != "torch":
                for name in names:
                    self._add_method(owner, name)
        for name, found, is_own in self._named(function.__globals__, names):
            self._add_named(name, found, is_leaf, by_value=is_own and _is_users(function))

    def _add_code(self, code: CodeType) -> list[str]:
        """Add code, with that of functions within. Returns the names that it uses, sorted."""
        names = {*code.co_names}
        self.say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                names |= {*self._add_code(constant)}
            else:
                self.say(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
        return sorted(names)

    def _named(self, namespace: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any, bool]]:
        """What names stand for in a namespace and in the modules that it names, and whether in itself."""
        modules, looked = [namespace], set[int]()
        while modules:
            place = modules.pop()
            if id(place) in looked:
                continue
            looked.add(id(place))
            for name in names:
                if isinstance(found := place.get(name), ModuleType):
                    modules.append(vars(found))
                elif found is not None:
                    yield name, found, place is namespace

    def _add_named(self, name: str, x: Any, of_leaf: bool, by_value: bool) -> None:
        """Add what a function names: code, registries of functions and, if asked for, any object `by_value`."""
        self.say(name)
        if not isinstance(x, type | FunctionType):
            x = getattr(x, "__wrapped__", x)
        if isinstance(x, FunctionType):
            for each in (x, vars(x).get("__wrapped__")):
                if isinstance(each, FunctionType):
                    self.add_function(each, depth=1 if of_leaf else 0)
        elif isinstance(x, type):
            self.say(x.__module__, x.__qualname__)
            if _root(x) not in _LEAVES and not of_leaf and (x, ()) not in self.classes:
                self.classes.add((x, ()))
                for own_name in sorted(vars(x)):
                    self._add_method(x, own_name)
        elif isinstance(x, BuiltinFunctionType):
            self.say(x.__module__, x.__qualname__)
        elif by_value:
            self.add(x)
        elif isinstance(x, Mapping):  # of attention functions and the like; those of ours are told by our files
            of_functions = {str(key): value for key, value in x.items() if isinstance(value, FunctionType)}
            for key, value in sorted(of_functions.items()):
                if _root(value) != _PACKAGE.name:
                    self.say(key)
                    self.add_function(value, depth=1)


@cache
def _own_code() -> str:
    """A digest of this package's files, whose version does not change while one works on it."""
    found = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _surroundings(device: torch.device) -> list[object]:
    """Versions, devices, and settings of PyTorch that change how it rounds or which kernels it takes."""
    matmul = torch.backends.cuda.matmul
    kernels = torch.backends.cuda
    return [
        _own_code(), sys.version, sys.platform, package_versions(), device.type, accelerators(),
        torch.backends.cpu.get_cpu_capability(), torch.backends.cudnn.version(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]  # the old getter fails with `tf32`
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction,
        kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
    ]  # fmt: skip


def fingerprint(model: PreTrainedModel, call: torch.nn.Module, attention: str, *settings: object) -> str:
    """
    The key of `model`, called by its wrapper `call`, with an `attention` implementation and further `settings`.

    Raises:
        [`UntoldError`]: Something in the model cannot be told by value.
    """
    if "/" in attention:
        raise UntoldError("the revision of a kernel from the hub")
    found = Fingerprint()
    found.add(_surroundings(model.device))
    found.add(settings)
    found.add(upstream.global_hooks())
    found.add_modules(model)
    found.add_wrappers(call, model)
    function = AttentionInterface().get(attention)
    if isinstance(function, FunctionType):
        found.add_function(function)
    return found.hexdigest()
