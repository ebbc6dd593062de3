"""Memory: what a batch needs, which layers recompute, in which parts or slices it runs, what a failure changes."""
