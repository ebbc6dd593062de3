"""The command line: `trl-paddingfree`, or `python -m trl_paddingfree`."""

import logging

from .main import main

__all__ = ["main"]

# bitsandbytes misses a kernel that nobody asked for. It says so when it is imported, here and in launched processes
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
