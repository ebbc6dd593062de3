"""Decoder layers compiled once."""
