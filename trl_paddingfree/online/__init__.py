"""Trainers that generate what they train on: GRPO, RLOO, distillation."""
