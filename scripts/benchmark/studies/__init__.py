"""Measurements of single parts: arranging micro-batches, packing, collators."""
