"""Verdicts of the start-up check that passed, kept in files, so that a restart takes seconds."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..core.check.comparison import Tried, Verdict
from ..core.check.progress import say_details
from ..core.check.prove import CheckResult
from ..core.check.verdicts import Record
from ..core.model.backends import BACKENDS
from ..core.model.routes import Route
from .fingerprint import fingerprint

logger = logging.get_logger(__name__)

# Names the folder of the verdicts; these values turn them off, and every start checks again
VARIABLE, _OFF = "TRL_PADDINGFREE_CACHE", ("", "0", "off", "no", "false")
# Where a checkpoint has the verdicts of its run
BESIDE = "start_up_check.json"


def cache_folder() -> Path | None:
    """The folder of the verdicts: `TRL_PADDINGFREE_CACHE`, or one in the user's cache; `None` if none are kept."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.strip().lower() in _OFF else Path(given).expanduser()
    with suppress(RuntimeError):  # there may be no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl-paddingfree"
    return None


def read_record(x: Any) -> Record:
    """A record from plain values. Raises an error of some kind if they are none, or if nothing passed."""
    verdict = x["verdict"] and _verdict(x["verdict"])
    record = Record(str(x["day"]), [*map(_result, x["results"])], verdict, dict(x["facts"]))
    if not (record.verdict or record.results[0]).passed:
        raise ValueError("a verdict that did not pass")
    return record


def _verdict(x: dict[str, Any]) -> Verdict:
    return Verdict(**{**x, "notes": tuple(x["notes"]), "tried": x["tried"] and Tried(**x["tried"])})


def _result(x: dict[str, Any]) -> CheckResult:
    route, gradients = Route(**x["route"]), x["gradients"] and _verdict(x["gradients"])
    if route.backend not in BACKENDS:
        raise ValueError(f"no backend: {route.backend!r}")
    return CheckResult(**{**x, "route": route, "gradients": gradients, "tried": x["tried"] and Tried(**x["tried"])})


def _is_lasting(record: Record) -> bool:
    """Whether a verdict would be the same on another day: not for lack of memory anywhere, or by values of weights."""
    said = f"{record.verdict} {' '.join(map(str, record.results))}".lower()
    return not any(passing in said for passing in ("memory", "alloc_failed", "another process", "not finite"))


class Remembered:
    """
    The verdicts of one run by their keys, in the user's cache and in the checkpoints of `output_dir`. Files that cannot
    be read or written are no error: the check runs again.
    """

    hint = f"`{VARIABLE}=off` checks again"

    def __init__(self, output_dir: str | None = None):
        self.folder = cache_folder()
        self.output_dir = output_dir
        self.of_run: dict[str, dict[str, object]] = {}  # as plain values

    def key(self, model: PreTrainedModel, call: Any, route: Route, *settings: object) -> str:
        """The key of a verdict, see [`fingerprint`]; empty if there is none."""
        if self.folder is None:
            return ""
        try:
            return fingerprint(model, call, route.loaded_with, repr(route), *settings)
        except Exception as error:  # anything may be in a model
            reason = f"{type(error).__name__}: {error}"
            say_details(logger.warning, f"The verdict on {type(model).__name__} is not remembered: {reason}.")
            return ""

    def recall(self, key: str) -> Record | None:
        """What was found under a key, if it was."""
        if self.folder is None or not key:
            return None
        for plain in self._places(key):
            # Foreign files may hold anything
            with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                record = read_record(plain)
                self.of_run[key] = plain
                return record
        return None

    def _places(self, key: str) -> Iterator[Any]:
        assert self.folder is not None
        yield _plain(self.folder / f"{key}.json")
        checkpoints = Path(self.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{BESIDE}") if self.output_dir else ()
        for file in checkpoints:
            verdicts = _plain(file)
            if isinstance(verdicts, dict):
                yield verdicts.get(key)

    def keep(
        self,
        key: str,
        results: Sequence[CheckResult] = (),
        verdict: Verdict | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what was found today under a key."""
        record = Record(date.today().isoformat(), results, verdict, facts or {})
        if self.folder is None or not key or not _is_lasting(record):
            return
        self.of_run[key] = asdict(record)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / f"{key}.json", self.of_run[key])

    def save(self, checkpoint: str) -> None:
        """Put the verdicts of this run into a checkpoint, which may be resumed on a machine with another cache."""
        if self.of_run:
            with suppress(OSError):
                _write(Path(checkpoint) / BESIDE, self.of_run)


def _plain(file: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def _write(file: Path, value: object) -> None:
    """Write JSON so that other processes see all of it or nothing."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as temporary:
        json.dump(value, temporary)
    Path(temporary.name).chmod(0o644)
    Path(temporary.name).replace(file)
