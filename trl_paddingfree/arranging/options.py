"""The option that arranges micro-batches."""

from dataclasses import dataclass
from typing import Literal

from ..core.trainers.options import CoreOptions, option


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for it."""

    arrange_micro_batches: Literal["none", "tokens", "prefix"] = option(
        "none",
        "Which examples of an optimizer step share a micro-batch. 'none': those drawn together. 'tokens': each "
        "micro-batch gets about the same work, so that processes do not wait for each other. 'prefix': examples that "
        "start alike share a micro-batch, so that more is computed once. Each step keeps its examples and their "
        "weights.",
    )
