"""Messages of other libraries that a user can do nothing about."""

import logging
import warnings


def silence() -> None:
    """
    Keep out what is said of names that TRL calls and transformers has renamed, and of kernels that nobody asked for.

    Other messages stay.
    """
    warnings.filterwarnings("ignore", message=".*checkpointing.* is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
