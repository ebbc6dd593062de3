"""Messages for users who wait for a check."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Timer

from .prove import Tell


@contextmanager
def announced_after(seconds: float, say: Tell) -> Iterator[Tell]:
    """
    Within this context, a check runs. Yields a function to tell its steps: after `seconds`, `say` announces the current
    one and all later ones.
    """
    is_long, steps = Event(), [""]

    def begin():
        is_long.set()
        say(steps[-1])

    def tell(doing):
        steps.append(doing)
        if is_long.is_set():
            say(doing)

    timer = Timer(seconds, begin)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
