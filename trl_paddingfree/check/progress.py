"""Messages for users who wait for a check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer


class Progress:
    """Announces the steps of a check, but only if it takes more than a few seconds."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.doing, self.is_long = say, "", False

    def __call__(self, doing: str) -> None:
        self.doing = doing
        if self.is_long:
            self.say(doing)

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Within this context, a check runs. After `seconds`, its current step and all later ones are announced."""

        def begin():
            self.is_long = True
            self(self.doing)

        timer = Timer(seconds, begin)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.is_long = False
