"""Which layers are built alike, so that two of a kind stand for all."""

from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType

import torch

from .. import upstream

# Attributes that do not tell kinds of layers apart: place in the stack, mode, and containers of modules and tensors
_PASSING = {"layer_idx", *(name for name in vars(torch.nn.Module()) if "hooks" not in name)}
# How deep other attributes are inspected, and how many objects per layer
_DEPTH, _OBJECTS = 6, 10_000


def kind_of(layer: torch.nn.Module) -> str:
    """
    A key that is equal for layers that differ in the values of their weights only: with the same forward functions,
    hooks, settings and other attributes, shapes and dtypes. Objects that cannot be inspected equal only themselves.
    """
    parts = {id(part): name for name, part in layer.named_modules()}
    seen: dict[int, tuple[int, object]] = {}  # keeps the objects alive, so that no id is reused

    def described(x, depth=_DEPTH):
        def within(*values):
            return type(x), *(described(value, depth - 1) for value in values)

        if x is None or isinstance(x, bool | int | float | complex | str | bytes | torch.dtype | torch.device | type):
            return repr(x)
        if id(x) in parts or id(x) in seen:
            return "part", parts.get(id(x)), seen.get(id(x), [None])[0]
        if depth == 0 or len(seen) > _OBJECTS or isinstance(x, torch.nn.Module | ModuleType):
            return id(x)
        seen[id(x)] = len(seen), x
        if torch.is_tensor(x):
            return *x.shape, *within(x.dtype, x.requires_grad, upstream.gradient_hooks(x), *sorted(vars(x).items()))
        if isinstance(x, FunctionType):
            cells = (cell.cell_contents for cell in x.__closure__ or ())
            return id(x.__code__), *within(x.__defaults__, x.__kwdefaults__, *sorted(vars(x).items()), *cells)
        if isinstance(x, MethodType):
            return within(x.__func__, x.__self__)
        if isinstance(x, partial):
            return within(x.func, *x.args, *sorted(x.keywords.items()))
        if isinstance(x, Mapping):
            return within(*(key for key in x if isinstance(key, str)), *x.values())
        if isinstance(x, list | tuple | set | frozenset):
            return within(*(sorted(x, key=repr) if isinstance(x, set | frozenset) else x))
        return within(*sorted(vars(x).items())) if hasattr(x, "__dict__") else id(x)

    found = []
    for name, part in layer.named_modules():
        attributes = sorted(entry for entry in vars(part).items() if entry[0] not in _PASSING)
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        found.append((name, type(part), described([*attributes, *tensors])))
    return repr(found)
