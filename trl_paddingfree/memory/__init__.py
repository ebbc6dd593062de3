"""Memory: what a batch needs, which layers recompute, and in which parts or slices it runs."""
