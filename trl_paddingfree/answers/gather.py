"""What processes gather of their pairs, of which each has another number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import recursively_apply


@dataclass(frozen=True)
class GatherDifferentNumbers:
    """
    Stands in for `accelerator.gather`, and takes tensors of different lengths. TRL's losses gather numbers of each
    pair, for metrics: without this, processes would wait for one another, or read numbers that nobody has sent.
    """

    gather: Callable[[Any], Any]

    def __call__(self, tensors: Any) -> Any:
        return recursively_apply(self.of_tensor, tensors)

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """One after another, the entries of all processes along the first dimension."""
        if not tensor.ndim:
            return self.gather(tensor)
        lengths = self.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        longest = max(lengths)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        of_processes = self.gather(padded).split(longest)
        return torch.cat([each[:length] for each, length in zip(of_processes, lengths, strict=True)])
