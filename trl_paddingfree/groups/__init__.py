"""One batch on a group of processes."""
