"""Models whose padded calls are computed flat, in any trainer, and packed rows of others."""
