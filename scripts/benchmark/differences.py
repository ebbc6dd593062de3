"""How far apart two runs are: the figures that both log, and tensors."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

# Parts of the names of figures that only one side logs, or that are times
INCOMPARABLE = ("flat/", "runtime", "per_second", "total_flos", "step_time")


def difference(expected: float | torch.Tensor | None, actual: float | torch.Tensor | None, floor: float = 1.0) -> float:
    """
    The largest difference of two figures or tensors, relative to the largest expected value, and at least to `floor`: a
    figure near zero is often the difference of larger ones, whose rounding it has.

    `None`, which TRL logs for a mean over nothing, equals NaN. If only one of both is a number, the result is infinite.

    >>> difference(-4.0, -5.0), difference(0.5, 0.75)
    (0.25, 0.25)
    >>> difference(None, 0.5)
    inf
    """
    a, b = (torch.as_tensor(math.nan if x is None else x, dtype=torch.float64) for x in (expected, actual))
    scale = torch.where(a.isfinite(), a.abs(), 0.0).amax().clamp(min=floor)
    off = ((a - b).abs() / scale).nan_to_num(math.inf, math.inf)
    return float(off.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).amax())


def differences(
    padded: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], floor: float = 1.0
) -> dict[str, float]:
    """The largest [`difference`] over all logs, of every figure that padded TRL logs; infinite where ours lacks one."""
    found: dict[str, float] = {}
    for expected, actual in zip_longest(padded, ours, fillvalue=dict[str, Any]()):
        for name, figure in expected.items():
            if not any(part in name for part in INCOMPARABLE):
                off = difference(figure, actual[name], floor) if name in actual else math.inf
                found[name] = max(found.get(name, 0.0), off)
    return found
