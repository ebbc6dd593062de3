"""From datasets to batches: loading, TRL's preparation, collators, and what padding wastes."""
