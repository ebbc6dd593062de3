"""Compares what a model computes in two ways, and tells rounding from mistakes."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

# A tolerance is this many times the noise of padded runs: flat runs round differently, but by as much. Over the routes,
# dtypes and models tried (576 runs of 2 and 32 layers), errors were at most 1.5 times the larger of two such noises
NOISE_FACTOR = 4.0
# Answers are tolerated up to this times the square root of the rounding unit (half the digits), relative to the effect
# of one token of context: padding itself may change answers, and agreement within such noise would mean nothing
HALF_DIGITS_FACTOR = 3.0
# The tolerance of gradients is this or half the digits, whichever is less, and measured noise may raise it up to the
# other, where arithmetic rounds more than its dtype says (4-bit weights). Mistakes move gradients by more
MOST_NOISE = 0.1
# Gradients of some weights are pure rounding, so errors are relative to at least this share of the largest norm. In low
# precision, rounding may also send a token to another expert
_LEAST_NORM, _LEAST_NORM_IN_LOW_PRECISION = 0.01, 0.1

Values: TypeAlias = Mapping[str, torch.Tensor]  # by name, float64 on the CPU


@dataclass(frozen=True)
class Tried:
    """The largest flat batch that was tried: how many rows, tokens of the longest, and tokens in all."""

    rows: int
    longest: int
    length: int

    def __str__(self) -> str:
        return f"up to {self.rows} rows of up to {self.longest:,} tokens, {self.length:,} in all"


@dataclass(frozen=True)
class Verdict:
    """
    What one comparison found.

    Args:
        error (`float`):
            Largest difference, relative to what was expected.
        worst (`str`):
            What differs most, in words.
        tolerance (`float`):
            Largest `error` that passes.
        failure (`str`):
            What is wrong whatever its size (a leak, lost context), or the error that the model raised.
        skipped (`str`):
            Why nothing was compared.
        notes (`tuple[str, ...]`):
            What else was not compared, and why.
        unmendable (`bool`):
            Whether rows alone fail, too, so that no other route can help.
        raised (`bool`):
            Whether `failure` is an error that the model raised.
        tried (`Tried`, *optional*):
            On what the two ways agree; `None` if nothing was compared.
    """

    error: float = math.nan
    worst: str = ""
    tolerance: float = math.nan
    failure: str = ""
    skipped: str = ""
    notes: tuple[str, ...] = ()
    unmendable: bool = False
    raised: bool = False
    tried: Tried | None = None

    @property
    def passed(self) -> bool:
        """Whether the two ways agree, as far as they were compared."""
        return not self.failure and (bool(self.skipped) or self.error <= self.tolerance)

    @property
    def reason(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        return self.failure or ("" if self.passed else f"{self.worst} are wrong by {self.error:.1e} of their size")

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What was not compared, and why. Until it is, the model cannot be called exact."""
        return (f"gradients were not compared, because {self.skipped}", *self.notes) if self.skipped else self.notes

    @property
    def extent(self) -> str:
        """How far the two ways agree, in words that claim no more than was tried."""
        sizes = f"exact on {self.tried}" if self.tried else "exact"
        return f"{sizes}, as far as it was compared" if self.not_compared else sizes

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        figures = [] if self.skipped else [f"{self.worst} {self.error:.1e}, allowed {self.tolerance:.1e}"]
        return "; ".join([*figures, *self.not_compared])


def compare(
    reference: Values,
    candidate: Values,
    noises: Callable[[], Iterable[Values]],
    unit: float,
    least: float | None = None,
    of_parameters: bool = False,
) -> Verdict:
    """
    Compare values of a `candidate` with those of a `reference`: the worst difference, and its tolerance.

    Args:
        reference, candidate (`Mapping`):
            Values by name, the same names in both.
        noises (`Callable`):
            Returns values that differ from the reference's by rounding only, in one way or several. Called if the least
            tolerance is exceeded.
        unit (`float`):
            The relative error of one rounding.
        least (`float`, *optional*):
            The least tolerance of answers, which noise raises to half the digits at most. By default, the values are
            gradients: the tolerance is half the digits or `MOST_NOISE`, whichever is less, and noise raises it up to
            the other.
        of_parameters (`bool`, *optional*, defaults to `False`):
            Whether some values may be pure rounding. One that is lost altogether (all zeros) still counts in full.
    """
    half, norms = HALF_DIGITS_FACTOR * unit**0.5, {name: float(x.norm()) for name, x in reference.items()}
    tolerance, most = sorted((half, MOST_NOISE)) if least is None else (min(least, half), half)
    is_low = unit > torch.finfo(torch.float32).eps
    share = (_LEAST_NORM_IN_LOW_PRECISION if is_low else _LEAST_NORM) * of_parameters
    least_norm = share * max(norms.values(), default=0.0)

    def errors(found):
        """The norm of each difference, relative to what was expected."""
        errors = {}
        for name, x in reference.items():
            least = least_norm * (1.0 if found[name].any() else NOISE_FACTOR * unit)
            errors[name] = float((found[name] - x).norm()) / max(norms[name], least, 1e-300)
        return errors

    found = errors(candidate)
    worst = max(found, key=lambda name: (math.isnan(found[name]), found[name]), default="")
    error = found.get(worst, 0.0)
    if not error <= tolerance:
        measured = (x for each in noises() for x in errors(each).values() if math.isfinite(x))
        tolerance = max(tolerance, min(NOISE_FACTOR * max(measured, default=0.0), most))
    return Verdict(error, worst, tolerance)


def root_mean_square(x: torch.Tensor) -> float:
    """The root mean square of all entries."""
    return float(x.pow(2).mean().sqrt())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((found - expected).norm()) / max(float(expected.norm()), 1e-300)
