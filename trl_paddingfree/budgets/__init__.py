"""Memory and token budgets: in which parts and slices a batch is computed, and which layers recompute."""
