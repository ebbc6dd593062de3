"""What the package can do beside its core: each capability is one folder, and only `cli/` imports it by its name.

A folder may be deleted: what it adds is gone then, and everything else works. What it adds to the trainers lies in its
`trainers.py`: `Collated` and `Online`, which are mixed in before the two bases of the trainers. Its options lie in its
`options.py`: `Options`, which join [`~trl_paddingfree.PaddingFreeOptions`]. docs/house.md adds one, and has the seams.

Where a folder is asked for by name, it is through [`module_of`] or [`needed`]: layers that carry states (`recurrent`)
by `core/model/mixers.py`, `torch_compile` by `core/trainers/base.py`, slices by `budgets`, `budgets` by `online`, and
`remembering` and what `padding_free` has options for by `anywhere`. Without any option of the user's, a trainer asks
`argument_checks` and `data_checks` while it is made, `remembering` before its start-up check, `proof` every 250 steps,
and `resuming` where checkpoints are saved and loaded; the others do nothing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Those that add to the trainers and their options: what the first adds goes around what the others add
ORDER = (
    "resuming",
    "remembering",
    "answers",
    "argument_checks",
    "data_checks",
    "proof",
    "images",
    "groups",
    "compiled",
    "budgets",
    "arranging",
    "own_collators",
)


def is_there(capability: str) -> bool:
    """Whether this copy of the package has the folder of a capability."""
    return find_spec(f"{__package__}.{capability}") is not None


def module_of(capability: str, module: str) -> Any:
    """A module of a capability; `None` if it, or the capability, is not there."""
    name = f"{__package__}.{capability}"
    return import_module(f"{name}.{module}") if is_there(capability) and find_spec(f"{name}.{module}") else None


def needed(capability: str, module: str, by: str) -> Any:
    """
    A module of a capability that the user has asked for, by what `by` names.

    Raises:
        `ImportError`: The capability is not there.
    """
    if not is_there(capability):
        raise ImportError(f"{by} needs the folder `{capability}` of {__package__}, and this copy is without it.")
    return import_module(f"{__package__}.{capability}.{module}")


def classes_of(module: str, name: str) -> list[type]:
    """The classes called `name` in the `module` of each capability that is there, outermost first."""
    modules = [module_of(capability, module) for capability in ORDER]
    return [vars(each)[name] for each in modules if each is not None and name in vars(each)]
