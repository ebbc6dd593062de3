"""The option that arranges micro-batches."""

from dataclasses import dataclass
from typing import Literal

from ..core.trainers.options import CoreOptions, option


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for it."""

    arrange_micro_batches: Literal["none", "tokens", "prefix"] = option(
        "none",
        "Which examples of an optimizer step share a micro-batch. 'none': as the sampler draws them. 'tokens': every "
        "micro-batch gets about the same work, so that processes do not wait for each other. 'prefix': examples that "
        "start alike meet, so that more is shared. The examples of each step, and their weights, stay the same.",
    )
