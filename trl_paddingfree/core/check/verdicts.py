"""Verdicts of earlier checks, which a start may take over. The core keeps none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedModel

from ..model.routes import Route
from .comparison import Verdict
from .prove import CheckResult


@dataclass(frozen=True)
class Record:
    """
    What was found on which `day`: `results`, the one that passed first, or the `verdict` on another way; and what else
    a check has found out, as `facts` of plain values.
    """

    day: str
    results: Sequence[CheckResult] = ()
    verdict: Verdict | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Verdicts(Protocol):
    """Verdicts of earlier checks, by keys that are equal if nothing has changed that a verdict depends on."""

    hint: str  # how to check again, in words

    def key(self, model: PreTrainedModel, call: Any, route: Route, *settings: object) -> str:
        """The key of a verdict on a model, called by its wrapper, by a route and settings; empty if there is none."""

    def recall(self, key: str) -> Record | None:
        """What was found under a key, if it was."""

    def keep(
        self,
        key: str,
        results: Sequence[CheckResult] = (),
        verdict: Verdict | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what was found under a key."""


class NoVerdicts:
    """Every start checks."""

    hint = ""

    def key(self, *_: object) -> str:
        """No key."""
        return ""

    def recall(self, key: str) -> None:
        """Nothing."""

    def keep(self, *_: object, **__: object) -> None:
        """Does nothing."""
