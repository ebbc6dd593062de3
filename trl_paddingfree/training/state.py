"""What this package keeps for one trainer, and how its overrides stand aside while the trainer pads."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..data.arrange import StepSampler
from ..memory.planner import MemoryPlanner
from ..model.flat_model import FlatModel
from ..model.routes import Route
from .configs import PaddingFreeOptions
from .proving import StartUpCheck

if TYPE_CHECKING:
    from .steps import TrainingSteps

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass
class FlatState:
    """What this package keeps for one trainer. Only `options` and `pads` are there before TRL's `__init__` has run."""

    options: PaddingFreeOptions
    pads: bool = False  # whether the trainer pads as TRL's does; then nothing of the rest is ever set
    check: StartUpCheck = field(init=False)
    models: list[FlatModel] = field(default_factory=list)  # the one that is trained first
    trained: FlatModel = field(init=False)  # the first of `models`
    planner: MemoryPlanner | None = None  # schedules passes within budgets; `None` without one, and before the weights
    steps: "TrainingSteps | None" = None  # training steps within budgets
    sampler: StepSampler | None = None  # the order of training, if `arrange_micro_batches` makes one
    is_planned: bool = False  # whether `planner` is settled: made, or not needed
    resumed_from: str | None = None  # the checkpoint that training goes on from

    @property
    def route(self) -> Route | None:
        """How batches are computed: the first choice, until the check has proven one. `None` without `models`."""
        return self.trained.route if self.models else None


class _WhenFlat:
    """A method that overrides one of TRL's, and stands aside while the trainer pads."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        method = self.method

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            called = getattr(super(owner, self), name) if self.flat.pads else functools.partial(method, self)
            return called(*args, **kwargs)

        setattr(owner, name, call)


def when_flat(method: Method) -> Method:
    """
    Decorate an override of one of TRL's methods: while the trainer pads, TRL's own is called in its place.

    >>> from types import SimpleNamespace
    >>> from trl_paddingfree import when_flat
    >>> class TRLTrainer:
    ...     def rows(self):
    ...         return "padded"
    >>> class OwnTrainer(TRLTrainer):
    ...     @when_flat
    ...     def rows(self):
    ...         return "flat, not " + super().rows()
    >>> trainer = OwnTrainer()
    >>> trainer.flat = SimpleNamespace(pads=False)  # as a trainer's `__init__` sets it
    >>> trainer.rows()
    'flat, not padded'
    >>> trainer.flat.pads = True
    >>> trainer.rows()
    'padded'
    """
    return cast(Method, _WhenFlat(method))
