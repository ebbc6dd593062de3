"""What a computation launches: a count, the same on every machine."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Launches(TorchDispatchMode):
    """Operations that compute or copy something (neither views nor memory without content), and the bytes they move."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.moved: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        name = function.name().split("::")[1].split(".")[0]
        output = function(*args, **(kwargs or {}))
        if not is_view and name not in ("empty", "empty_like", "_unsafe_view"):
            self.names.append(name)
            tensors = {id(x): x.nbytes for x in tree_leaves((args, kwargs, output)) if isinstance(x, torch.Tensor)}
            self.moved.append(sum(tensors.values()))
        return output
