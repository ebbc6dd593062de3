"""Rows laid out on one axis of tokens: segments, the tree they form, and the batch. No model code."""
