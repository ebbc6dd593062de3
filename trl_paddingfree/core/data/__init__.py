"""From data sets to batches: loading, TRL's preparation, collators, and what padding wastes."""
