"""Padding-free trainers: one module per TRL trainer, and what they share."""
