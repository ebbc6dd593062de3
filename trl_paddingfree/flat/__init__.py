"""Rows as one axis of tokens: segments, the tree they form, and the batch. Integers and tensors, no model."""
