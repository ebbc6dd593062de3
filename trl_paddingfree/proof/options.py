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
        "Look at a micro-batch every so many optimizer steps, before training on it: its rows go through the model "
        "one by one, and their answers and gradients must be those of the flat batch. The trainer always looks at the "
        "first micro-batch of a run. With 0, it proves the model before training only.",
    )
