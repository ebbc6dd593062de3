"""Which examples share a micro-batch."""
