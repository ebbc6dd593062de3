"""What users see of a check: a progress bar while they wait, and its figures if they ask for details."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils import logging

from .prove import STEPS, Tell


def say_details(say: Callable[[str], object], message: str) -> None:
    """Say a message if `log_level` is `info` or lower. transformers sets that level for its own loggers only."""
    if logging.get_verbosity() <= logging.INFO:
        say(message)


@contextmanager
def shown(what: str, is_shown: bool = True, steps: int = STEPS) -> Iterator[Tell]:
    """
    Within this context, a check runs, and a bar shows `what` it does. Yields a function to tell each step before it
    starts. Further routes take as many steps again.
    """
    silent = {} if is_shown else {"disable": True}  # by default, as `TQDM_DISABLE` says
    with tqdm(desc=f"Checking {what}", total=steps, **silent) as bar:
        told = 0

        def tell(doing: str) -> None:
            nonlocal told
            if told:
                bar.update()
            if told == bar.total:
                bar.total += steps
            told += 1
            bar.set_postfix_str(doing)

        yield tell
        bar.total = bar.n = max(told, 1)
        bar.set_postfix_str("")
