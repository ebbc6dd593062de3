"""Padded TRL and padding-free training side by side; single parts; the tables of results. Run `--help`."""
