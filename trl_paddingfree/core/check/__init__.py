"""Is a model exact on flat batches? The start-up check."""
