"""The command line: `trl-paddingfree`, or `python -m trl_paddingfree`."""

from .main import main

__all__ = ["main"]
