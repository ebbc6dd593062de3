"""The quick start: padded TRL and this package train the same small model side by side, anywhere."""
