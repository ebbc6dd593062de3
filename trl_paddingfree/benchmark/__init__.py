"""Side by side with TRL: the same model, rows and seed, stepped in turn in one process."""

from .main import main

__all__ = ["main"]
