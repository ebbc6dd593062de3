"""Is it exact on this model? The start-up check, and what it says."""
