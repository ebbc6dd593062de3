"""Which generated rows share a micro-batch: those of one prompt come together."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from trl.trainer.utils import split_tensor_dict, unsplit_pixel_values_by_grid

from ..core.flat.batch import Inputs


def by_prompt(
    batches: Sequence[Inputs], split: Callable[[Inputs], Inputs], kinds: Callable[[Inputs], Sequence[int]]
) -> list[Inputs]:
    """
    Reorder the rows of micro-batches of one width so that those with the same prompt, and of the same of their `kinds`,
    come together. Micro-batches keep their size and hold, as in TRL, tensors and lists of one entry per row, and values
    that all rows have in common. Where rows have several entries in a tensor, `split` makes a list of one per row.

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches, dict, lambda rows: [0] * 4)]
    [[[1], [1]], [[2], [2]]]
    """
    size = len(batches[0]["prompt_ids"])
    rows = [row for batch in batches for row in split_tensor_dict(split(batch), size)]
    whole = _joined(rows)
    keys = [(prompt.tobytes(), x) for prompt, x in zip(whole["prompt_ids"].cpu().numpy(), kinds(whole), strict=True)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    return [_joined([rows[row] for row in order[i : i + size]]) for i in range(0, len(rows), size)]


def _joined(rows: Sequence[Inputs]) -> Inputs:
    joined = dict(rows[0])
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, torch.Tensor) and first.ndim:
            joined[name] = torch.cat(values)
        elif isinstance(first, list):
            joined[name] = [*chain(*values)]
    return unsplit_pixel_values_by_grid(joined)
