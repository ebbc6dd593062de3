"""Memory: what a batch needs, which layers recompute, in which parts it runs, and what a failed allocation changes."""
