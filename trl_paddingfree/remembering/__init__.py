"""Verdicts of the start-up check that passed, so that a restart takes seconds."""
