"""Integers only: which examples share a micro-batch, and how much fits into one."""
