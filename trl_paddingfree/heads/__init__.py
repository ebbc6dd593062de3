"""Trainers of other heads and data: reward, KTO."""
