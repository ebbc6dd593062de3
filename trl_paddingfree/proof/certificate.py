"""What looks have found so far, as the log, the trainer's state and the model card say it."""

from dataclasses import dataclass, field

from ..core.model.flat_model import FlatModel
from .look import Looked


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

    def count(self, rows: int, tokens: int, left_out: int, error: float, doubts: int) -> None:
        """Count one look, of all processes."""
        self.number += bool(rows)
        self.rows, self.tokens, self.left_out = self.rows + rows, self.tokens + tokens, self.left_out + left_out
        self.largest_error, self.doubts = max(self.largest_error, error), self.doubts + bool(doubts)

    def news(self, looked: Looked) -> list[str]:
        """Note what one look could not compare, and return it in words: each reason the first time."""
        reasons = {reason: reason for reason in looked.verdict.not_compared}
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


def explained(flat_model: FlatModel, looked: Looked, of_what: str) -> str:
    """What a look has found that ends training."""
    verdict = looked.verdict
    if verdict.passed:
        return f"Another process has found a mistake in {of_what}, which its message names."
    allowed = "" if verdict.failure else f", where rounding explains {verdict.tolerance:.1e}"
    return (
        f"{type(flat_model.model).__name__} computes {of_what}, of {looked.rows} rows and {looked.tokens} tokens, by "
        f"«{flat_model.route}» differently from its rows one by one: {verdict.reason}{allowed}."
    )
