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

Values: TypeAlias = Mapping[str, torch.Tensor | None]  # by name, float64 on the CPU; `None` where no gradient arrives


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


@dataclass(frozen=True)
class Comparison:
    """
    Values of a `candidate` beside those of a `reference`.

    Args:
        reference, candidate (`Mapping`):
            Values by name. Names that only one of them has are not compared.
        noise (`Callable`):
            Gives values that only round differently from the reference's. It is called if `least` does not do.
        unit (`float`):
            The relative error of one rounding.
        least, most (`float`):
            The tolerance without noise, and the most that noise may raise it to.
        of_parameters (`bool`, *optional*, defaults to `False`):
            Whether some of the values may be nothing but rounding. What is lost altogether counts in full even then.
    """

    reference: Values
    candidate: Values
    noise: Callable[[], Values]
    unit: float
    least: float
    most: float
    of_parameters: bool = False

    @classmethod
    def of_answers(
        cls, reference: Values, candidate: Values, noise: Callable[[], Values], unit: float, least: float
    ) -> "Comparison":
        """Of answers, at most half of whose digits are noise."""
        half = HALF_DIGITS_FACTOR * unit**0.5
        return cls(reference, candidate, noise, unit, min(least, half), half)

    @classmethod
    def of_gradients(
        cls, reference: Values, candidate: Values, noise: Callable[[], Values], unit: float, of_parameters: bool = False
    ) -> "Comparison":
        """Of gradients, whose tolerance is half their digits unless padded rows show more noise."""
        half = HALF_DIGITS_FACTOR * unit**0.5
        return cls(reference, candidate, noise, unit, min(half, MOST_NOISE), max(half, MOST_NOISE), of_parameters)

    def errors(self, found: Values) -> dict[str, float]:
        """The norm of each difference, relative to what was expected."""
        expected = {name: x for name, x in self.reference.items() if x is not None and name in found}
        norms = {name: float(x.norm()) for name, x in expected.items()}
        is_low = self.unit > torch.finfo(torch.float32).eps
        share = (_LEAST_NORM_IN_LOW_PRECISION if is_low else _LEAST_NORM) * self.of_parameters
        least_norm = share * max(norms.values(), default=0.0)
        errors = {}
        for name, x in expected.items():
            value = found[name]
            is_lost = value is None or not value.any()
            least = least_norm * (NOISE_FACTOR * self.unit if is_lost else 1.0)
            errors[name] = float((x if value is None else value - x).norm()) / max(norms[name], least, 1e-300)
        return errors

    def verdict(self) -> Verdict:
        """The worst of the differences, and what is tolerated."""
        errors = self.errors(self.candidate)
        if not errors:
            return Verdict(0.0, "", self.least)
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        tolerance = self.least
        if not errors[worst] <= tolerance:
            noises = filter(math.isfinite, self.errors(self.noise()).values())
            tolerance = max(tolerance, min(NOISE_FACTOR * max(noises, default=0.0), self.most))
        return Verdict(errors[worst], worst, tolerance)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that is furthest from passing, or closest to its tolerance."""
    return max(verdicts, key=lambda x: (math.isnan(x.error), x.error / x.tolerance))


def root_mean_square(x: torch.Tensor) -> float:
    """The root mean square of all entries."""
    return float(x.pow(2).mean().sqrt())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return float((found - expected).norm()) / max(float(expected.norm()), 1e-300)
