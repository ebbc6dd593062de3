"""What looks have found so far, as the log, the trainer's state and the model card say it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from transformers.utils import logging

from ..core.model.flat_model import FlatModel
from .look import Looked

logger = logging.get_logger(__name__)

OfAll: TypeAlias = Callable[[list[float]], torch.Tensor]


@dataclass
class Certificate:
    """
    How much was looked at, and what differed.

    Args:
        number (`int`, *optional*, defaults to `0`):
            How many calls were compared.
        rows, tokens, left_out (`int`, *optional*, defaults to `0`):
            How many rows and tokens of these were compared, and how many rows could not be computed alone.
        largest_error (`float`, *optional*, defaults to `0.0`):
            The largest difference that passed, relative to what was expected.
        doubts (`int`, *optional*, defaults to `0`):
            How often a difference was too large, but did not recur with other tokens in the same places.
        not_compared (`list[str]`, *optional*):
            What was not compared, and why.
    """

    number: int = 0
    rows: int = 0
    tokens: int = 0
    left_out: int = 0
    largest_error: float = 0.0
    doubts: int = 0
    not_compared: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Certificate":
        """That of a checkpoint, which another release may have saved."""
        return cls(**{each.name: saved[each.name] for each in fields(cls) if each.name in saved})

    def add(
        self, looked: Looked, of_all: OfAll = lambda numbers: torch.tensor([numbers]), alike: int = 1
    ) -> tuple[float, list[str]]:
        """
        Count what one look has found. Returns the largest difference that passed on any process, -1 if none did, and
        what is to be said, in words: what this process could not compare, each reason the first time.

        `of_all` gives numbers of all processes, `(processes, N)`, from those of this one. As many successive ones as
        are `alike` have looked at the same rows.
        """
        found = of_all([looked.rows, looked.tokens, len(looked.left_out), looked.error, float(bool(looked.doubt))])
        (rows, tokens, left_out, _, doubts), error = map(int, found[::alike].sum(0).tolist()), found[:, 3].max().item()
        self.number += bool(rows)
        self.rows, self.tokens, self.left_out = self.rows + rows, self.tokens + tokens, self.left_out + left_out
        self.largest_error, self.doubts = max(self.largest_error, error), self.doubts + bool(doubts)
        doubt = [f"{looked.doubt}, but not with other tokens in the same places"] if looked.doubt else []
        return error, [*self._news(looked), *doubt]

    def _news(self, looked: Looked) -> list[str]:
        reasons = {reason: reason for reason in looked.verdict.notes}
        if skipped := looked.verdict.skipped:
            reasons[f"some batches were not compared, because {skipped}"] = f"nothing was compared, because {skipped}"
        for error in dict.fromkeys(looked.left_out.values()):
            rows = [row for row, found in looked.left_out.items() if found == error]
            reasons[f"rows could not be computed alone ({error})"] = f"{_rows(rows)} not computed alone ({error})"
        if looked.in_slices:
            reasons["rows alone exceeded the budget, so that they were computed in slices, too"] = (
                f"{_rows([*looked.in_slices])} computed in slices, too, as the budget asks of them alone"
            )
        new = {reason: said for reason, said in reasons.items() if reason not in self.not_compared}
        self.not_compared += new
        return [*new.values()]

    def __str__(self) -> str:
        missing = f" Not compared: {'; '.join(self.not_compared)}." if self.not_compared else ""
        if not self.number:
            return f"none of its batches could be compared with its rows one by one.{missing}" if missing else ""
        left_out = f" {self.left_out:,} rows were left out." if self.left_out else ""
        doubts = (
            f" In {self.doubts} of them, more differed, but not with other tokens in the same places: rounding does so "
            "in low precision, and a mistake does not."
        ) * bool(self.doubts)
        return (
            f"{self.number} of its batches ({self.rows:,} rows, {self.tokens:,} tokens) were computed row by row, too: "
            f"answers and gradients differed by at most {self.largest_error:.1e} of their size.{doubts}{left_out}"
            f"{missing}"
        )


def _rows(numbers: list[int]) -> str:
    several = len(numbers) > 1
    return f"row{'s' * several} {', '.join(map(str, sorted(numbers)))} {'were' if several else 'was'}"


def conclude(flat_model: FlatModel, looked: Looked, messages: list[str], *, by: str, of_what: str, advice: str) -> str:
    """
    Log the `messages` of [`Certificate.add`] on a look at `of_what`. Returns what ends training, with what to do, if
    any process has found a mistake; else, an empty string.
    """
    for message in messages:
        logger.warning(f"{by}: of {of_what}, {message}.")
    return "" if looked.agreed else f"{_explained(flat_model, looked, of_what)} {advice}"


def _explained(flat_model: FlatModel, looked: Looked, of_what: str) -> str:
    """What a look has found that ends training."""
    verdict = looked.verdict
    if verdict.passed:
        return f"Another process has found a mistake in {of_what}, which its message names."
    allowed = "" if verdict.failure else f", where rounding explains {verdict.tolerance:.1e}"
    return (
        f"{type(flat_model.model).__name__} computes {of_what}, of {looked.rows} rows and {looked.tokens} tokens, with "
        f"{flat_model.route}, differently from its rows one by one: {verdict.reason}{allowed}."
    )
