"""From examples to batches: tasks, collators and lengths."""
