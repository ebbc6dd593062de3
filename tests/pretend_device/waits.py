"""What makes the host wait is counted, with the line that asked."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = str(Path(__file__).parent)
FOLDERS = (Path(__file__).parents[2], Path(torch.__file__).parents[1])  # of the repository, and of installed packages


@dataclass(frozen=True)
class Wait:
    """Why the host waits for the device, and the innermost line that is not PyTorch's."""

    reason: str  # the operator, "copy to the device" or "copy to the host"
    file: str  # path in the repository or among the installed packages
    function: str  # name of the function around the line, with those of its classes
    line: int


WAITS: Counter[Wait] = Counter()
# Non-blocking copies from the device that have not arrived: where to, and what
_on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []
_arrived = 0  # how many have


@contextmanager
def counted_waits() -> Iterator[Counter[Wait]]:
    """A counter that holds, once the context is left, what made the host wait in it."""
    before, counted = WAITS.copy(), Counter()
    yield counted
    counted.update(WAITS - before)


def wait(reason: str) -> None:
    """Count that the host waits; all that is on its way arrives."""
    WAITS[_here(reason)] += 1
    arrive()


def arrive() -> None:
    """All copies from the device have arrived."""
    global _arrived
    for target, value in _on_their_way:
        target.copy_(value)
    _arrived += len(_on_their_way)
    _on_their_way.clear()


def _here(reason: str) -> Wait:
    frame: Any = sys._getframe(2)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(FOLDER)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    names = [str(path.relative_to(folder)) for folder in FOLDERS if path.is_relative_to(folder)]
    return Wait(reason, names[0] if names else str(path), frame.f_code.co_qualname, frame.f_lineno)


def leave(target: torch.Tensor, value: torch.Tensor, without_waiting: bool) -> None:
    """Have a value leave the device: it arrives at once, or when the host next waits."""
    if without_waiting:
        _on_their_way.append((target, value.clone()))
        target.fill_(1)
    else:
        wait("copy to the host")
        target.copy_(value)


class Event:
    """It has happened once the copies from the device before it have arrived."""

    def __init__(self) -> None:
        self.after = _arrived + len(_on_their_way)

    def query(self) -> bool:
        return _arrived >= self.after

    def synchronize(self) -> None:
        if not self.query():
            wait("event")


class Stream:
    """The one queue of work of the device."""

    device_index, stream_id = 0, 0

    def record_event(self) -> Event:
        return Event()

    def is_capturing(self) -> bool:
        return False
