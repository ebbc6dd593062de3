"""What a model computes one way, compared with what it computes another way: which differences are rounding."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

# A tolerance is this many times the noise of padded runs: flat runs round differently, but as much. Over the routes,
# dtypes and models tried (576 runs of 2 and 32 layers), errors were at most 1.5 times the larger of two such noises
NOISE_FACTOR = 4.0
# No tolerance exceeds this times the square root of the rounding unit (half the digits), relative to the effect of one
# token of context: padding itself may change a model's answers, and agreement within such noise would mean nothing
HALF_DIGITS_FACTOR = 3.0
# The most that measured noise may raise the tolerance of gradients to, where arithmetic rounds more than its dtype says
# (4-bit weights): mistakes move gradients by more
MOST_NOISE = 0.1
# Gradients of some weights are nothing but rounding: an error counts relative to this share of the largest norm, if
# that is more than the norm of what is expected. In low precision, rounding may also send a token to another expert
_LEAST_NORM, _LEAST_NORM_IN_LOW_PRECISION = 0.01, 0.1

Values: TypeAlias = Mapping[str, torch.Tensor]  # by name, float64 on the CPU


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
            What is wrong at any size (a leak, lost context), or the error that the model raised.
        skipped (`str`):
            Why nothing was compared.
        notes (`tuple[str, ...]`):
            What else was not looked at, each with the reason.
        unmendable (`bool`):
            Whether rows alone fail, too: no other way to compute flat batches can mend that.
    """

    error: float = float("nan")
    worst: str = ""
    tolerance: float = float("nan")
    failure: str = ""
    skipped: str = ""
    notes: tuple[str, ...] = ()
    unmendable: bool = False

    @property
    def passed(self) -> bool:
        """Whether the two ways agree, as far as was compared."""
        return not self.failure and (bool(self.skipped) or self.error <= self.tolerance)

    @property
    def reason(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        return self.failure or ("" if self.passed else f"{self.worst} are wrong by {self.error:.1e} of their size")

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What would have to be compared to call the model exact, and was not, each with the reason."""
        return (f"gradients were not compared, because {self.skipped}", *self.notes) if self.skipped else self.notes

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        figures = [] if self.skipped else [f"{self.worst} {self.error:.1e}, allowed {self.tolerance:.1e}"]
        return "; ".join([*figures, *self.not_compared])


def compare(
    reference: Values,
    candidate: Values,
    noise: Callable[[], Values],
    unit: float,
    least: float | None = None,
    of_parameters: bool = False,
) -> Verdict:
    """
    The worst difference between values of a `candidate` and those of a `reference`, and what is tolerated.

    Args:
        reference, candidate (`Mapping`):
            Values by name, which both have.
        noise (`Callable`):
            Gives values that only round differently from the reference's. It is called if the least tolerance is not
            enough.
        unit (`float`):
            The relative error of one rounding.
        least (`float`, *optional*):
            The least tolerance of answers, at most half of whose digits are noise. By default, these are gradients:
            half of their digits are tolerated, or more if padded rows show more noise.
        of_parameters (`bool`, *optional*, defaults to `False`):
            Whether some of the values may be nothing but rounding. What is lost altogether counts in full even then.
    """
    half, norms = HALF_DIGITS_FACTOR * unit**0.5, {name: float(x.norm()) for name, x in reference.items()}
    tolerance, most = sorted((half, MOST_NOISE)) if least is None else (min(least, half), half)
    is_low = unit > torch.finfo(torch.float32).eps
    share = (_LEAST_NORM_IN_LOW_PRECISION if is_low else _LEAST_NORM) * of_parameters
    least_norm = share * max(norms.values(), default=0.0)

    def errors(found: Values) -> dict[str, float]:
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
        noises = filter(math.isfinite, errors(noise()).values())
        tolerance = max(tolerance, min(NOISE_FACTOR * max(noises, default=0.0), most))
    return Verdict(error, worst, tolerance)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that is furthest from passing, or closest to its tolerance."""
    return max(verdicts, key=lambda x: (math.isnan(x.error), x.error / x.tolerance))


def root_mean_square(x: torch.Tensor) -> float:
    """The root mean square of all entries."""
    return float(x.pow(2).mean().sqrt())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((found - expected).norm()) / max(float(expected.norm()), 1e-300)
