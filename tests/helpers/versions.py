"""What tests ask of the versions that they run with."""

import transformers
from packaging.version import Version


def is_older(version: str) -> bool:
    """Whether transformers is older than `version`."""
    return Version(transformers.__version__) < Version(version)
