"""Messages of other libraries that a user can do nothing about."""

import logging
import warnings


def silence() -> None:
    """
    Silence warnings about names that TRL calls and transformers has renamed, and about kernels that nobody asked for.

    All other messages stay.
    """
    warnings.filterwarnings("ignore", message=".*checkpointing.* is deprecated", category=FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
