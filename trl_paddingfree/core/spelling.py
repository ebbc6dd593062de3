"""What was meant by a word that is misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], name: str = "{}", cutoff: float = 0.8) -> str:
    """A question that offers the known word closest to `word`, formatted by `name`; empty if none is close."""
    close = get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return f" Did you mean `{name.format(close[0])}`?" if close else ""
