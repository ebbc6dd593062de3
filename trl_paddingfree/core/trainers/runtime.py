"""What this package keeps for one trainer, and the decorator that skips its overrides while the trainer pads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig

from ..device import PeakMemory
from ..flat.batch import Inputs
from ..flat.counts import TokenCounts
from ..model import architecture
from ..model.flat_model import FlatModel
from ..model.routes import Route
from .configs import PaddingFreeOptions
from .proving import StartUpCheck

Method = TypeVar("Method", bound=Callable[..., Any])
Step = Callable[[Inputs], torch.Tensor]  # computes the loss of a micro-batch, and its gradients
# Called in place of a step, with that step, whether its loss is divided by the tokens of the whole step of the
# optimizer, and the micro-batch
AroundStep = Callable[[Step, bool, Inputs], torch.Tensor]
# Called in place of TRL's `compute_loss`, with that method and its arguments, the first of which are model and inputs
AroundLoss = Callable[..., Any]


@dataclass
class Runtime:
    """
    What this package keeps for one trainer, as its `runtime`. Made before TRL's `__init__` runs; the fields without a
    default are set after it, before the trainer is done.
    """

    options: PaddingFreeOptions
    pads: bool = False  # whether the trainer pads as TRL's does: then no model is flat
    counts: TokenCounts = field(default_factory=TokenCounts)
    check: StartUpCheck = field(init=False)
    models: list[FlatModel] = field(default_factory=list)  # the trained one first
    trained: FlatModel = field(init=False)  # the first of `models`
    peak_memory: PeakMemory = field(init=False)
    # What capabilities put around each step and each loss, in evaluation too; the last goes around the others. None in
    # a plain run. Budgets: the parts of a micro-batch, and the weights of their losses
    around_step: list[AroundStep] = field(default_factory=list)
    around_loss: list[AroundLoss] = field(default_factory=list)
    has_begun: bool = False  # whether a step was trained since `train()` was called
    has_hooks: bool | None = None  # whether gradients have hooks of others than PEFT; `None`: not looked yet

    @property
    def route(self) -> Route | None:
        """How batches are computed: the first choice, until the check has proven one. `None` without `models`."""
        return self.trained.route if self.models else None

    def rotary_limits(self) -> dict[str, int]:
        """By `rope_type`: the row length from which rotary frequencies of a model depend on the longest row."""
        return architecture.rotary_limits(*self._text_configs())

    def reach_of(self, width: int) -> int | None:
        """The `width` of padded rows, if rotary frequencies of a model depend on it; else `None`."""
        return architecture.rotary_reach(width, *self._text_configs())

    def _text_configs(self) -> list[PreTrainedConfig]:
        return [flat_model.model.config.get_text_config() for flat_model in self.models]

    @property
    def highest_peak(self) -> int:
        """Peak bytes in use so far, the highest of any process that computes the same batches."""
        return int(self.trained.peers.largest([self.peak_memory.highest])[0])


def when_flat(method: Method) -> Method:
    """
    Decorator for overrides of TRL's methods: while the trainer pads, TRL's own method is called instead.

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
    >>> trainer.runtime = SimpleNamespace(pads=False)  # as a trainer's `__init__` sets it
    >>> trainer.rows()
    'flat, not padded'
    >>> trainer.runtime.pads = True
    >>> trainer.rows()
    'padded'
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.runtime.pads:
            return method(self, *args, **kwargs)
        owner = next(each for each in reversed(type(self).__mro__) if vars(each).get(method.__name__) is call)
        return getattr(super(owner, self), method.__name__)(*args, **kwargs)

    return cast(Method, call)
