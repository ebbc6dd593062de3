"""Mistakes in arguments that TRL would find late, or never, said before anything is loaded."""
