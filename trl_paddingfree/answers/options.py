"""The options of data with several answers per prompt."""

import math
from dataclasses import dataclass
from typing import Literal

from ..core.trainers.options import CoreOptions, option


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for it. DPO and reward models read them."""

    answer_pairs: Literal["all", "best", "extremes"] = option(
        "all",
        "Which pairs of a prompt with `completions` and `scores` train. 'all': every two answers whose scores differ. "
        "'best': the best answer against each other one. 'extremes': the best against the worst. TRL's losses compare "
        "pairs; there are none over whole rankings. DPO and reward models only.",
    )
    min_score_margin: float = option(
        0.0, "The least difference between the scores of a pair of `answer_pairs`. Equal scores make no pair."
    )

    def check_values(self) -> None:
        super().check_values()
        margin = self.min_score_margin
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
            raise ValueError(f"`min_score_margin={margin!r}` must be a number of at least 0.")

    def for_padded_too(self) -> set[str]:
        return super().for_padded_too() | {"answer_pairs", "min_score_margin"}
