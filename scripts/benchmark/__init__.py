"""Compare padded TRL with padding-free training, and measure single parts: `python -m scripts.benchmark --help`."""
