"""One file per TRL trainer, and what they share."""
