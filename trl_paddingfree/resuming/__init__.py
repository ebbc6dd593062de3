"""Checkpoints that training resumes from."""
