"""What a run does, whichever trainer it is of: configuration, refusals, the check, steps, checkpoints, groups."""
