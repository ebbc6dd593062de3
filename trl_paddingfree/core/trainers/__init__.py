"""Padding-free SFT and DPO, and the bases of all trainers."""
