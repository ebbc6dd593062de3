"""Integers only: which examples share a micro-batch, and what fits into one."""
