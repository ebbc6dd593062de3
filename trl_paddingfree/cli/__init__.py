"""The command line: `trl-paddingfree`, or `python -m trl_paddingfree`."""

import logging

from .main import main

__all__ = ["main"]

# Imported on a CPU, bitsandbytes warns if it cannot load an optional kernel: here, and in processes launched from here
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
