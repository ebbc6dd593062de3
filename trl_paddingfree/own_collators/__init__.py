"""Collators of one's own, and of others, that pad: SFT takes any."""
