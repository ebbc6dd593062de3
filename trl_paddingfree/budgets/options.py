"""The options of budgets of tokens and of memory."""

from dataclasses import dataclass

from ..core.trainers.options import CoreOptions, option


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for them."""

    max_tokens_per_micro_batch: int | None = option(
        None,
        "The most tokens to compute at once. A larger micro-batch runs in parts, and a row, pair or group that is "
        "still too large runs in slices, one after another, with the same loss and gradients. A slice keeps all its "
        "activations, whatever `gradient_checkpointing` says, and all slices but the last are computed once more in "
        "the backward pass.",
    )
    memory_budget: float | str | None = option(
        None,
        "The GiB that training may use on each device. 'auto': what other processes leave free, less a tenth. Each "
        "micro-batch then recomputes as few layers as memory requires, and one that still does not fit runs in parts "
        "or slices, with the same loss and gradients. This replaces `gradient_checkpointing`, which is ignored. "
        "Without a budget, layers recompute as TRL's options say.",
    )

    @property
    def has_budget(self) -> bool:
        """Whether steps keep within a budget of memory or of tokens."""
        return self.memory_budget is not None or self.max_tokens_per_micro_batch is not None

    def check_values(self) -> None:
        super().check_values()
        self.memory_budget = _checked(self.memory_budget)


def _checked(budget: float | str | None) -> float | str | None:
    """`memory_budget` as a number, `"auto"` or `None`; a command line gives numbers as strings."""
    if budget is None or budget == "auto":
        return budget
    try:
        gib = 0.0 if isinstance(budget, bool) else float(budget)
    except (TypeError, ValueError):
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ValueError(f"`memory_budget={budget!r}` must be a positive number of GiB, 'auto', or left out.")
    return gib
