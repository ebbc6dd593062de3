"""One batch in slices, one after another."""
