"""The option that says how often the proof goes on."""

from dataclasses import dataclass

from ..core.trainers.options import CoreOptions, Count, option

# The smallest number that costs at most 1 % of the time of training, see `docs/accuracy.md`
EVERY = 250


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for it."""

    check_steps: Count = option(
        EVERY,
        "Every how many optimizer steps the trainer looks at the micro-batch at hand before it trains on it: its rows "
        "go through the model one by one, and their answers and gradients must be those of the flat batch. It always "
        "looks at the first one of a run. With 0, the model is proven before training only.",
    )
