"""The command line: `trl-paddingfree`, or `python -m trl_paddingfree`."""

import logging

from .main import main

__all__ = ["main"]

# When it is imported on a CPU, bitsandbytes warns of an optional kernel: in this process, and in those it launches
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
