"""Everything about images: in examples, in rows, in models, and in the start-up check."""
