"""What this package keeps for one trainer, and the decorator that skips its overrides while the trainer pads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig

from ...capabilities import module_of, needed
from .. import upstream
from ..check.prove import UnprovenModelError
from ..device import PeakMemory
from ..flat.batch import Inputs
from ..flat.counts import TokenCounts
from ..model import architecture
from ..model.casts import cast_inputs_once
from ..model.flat_model import FlatModel
from ..model.peers import Alone, Peers
from ..model.routes import Route
from .configs import PaddingFreeOptions
from .engine import wants_compiled
from .proving import Models, StartUpCheck
from .refusals import refuse_adapters, warn_of_dropout

if TYPE_CHECKING:
    from .base import FlatTrainer

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
    What this package keeps for one trainer, and how it starts: it proves the models. Only the first three fields are
    set before TRL's `__init__` runs; those without a default are set while it is made.
    """

    options: PaddingFreeOptions
    pads: bool = False  # whether the trainer pads as TRL's does: then no model is flat
    counts: TokenCounts = field(default_factory=TokenCounts)
    compiler: dict[str, Any] | None = None  # how layers are compiled; `None`: they are not
    peers: Peers = field(default_factory=Alone)  # the processes that compute batches together with this one
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

    def place(self, accelerator: Accelerator) -> None:
        """Take over what an `accelerator`, when it is made, says of the device, the compiler and the processes."""
        self.peak_memory = PeakMemory(accelerator.device)
        if not self.pads:
            if wants_compiled(accelerator):
                self.compiler = needed("compiled", "layers", "`torch_compile=True`").taken_from(accelerator)
            loaders = accelerator.dataloader_config
            loaders.dispatch_batches = bool(loaders.dispatch_batches)  # `None` would dispatch batches of streams

    def start(self, trainer: "FlatTrainer") -> None:
        """Prove the models of a `trainer`, and have them compute flat batches."""
        refuse_adapters(trainer.flat_models())
        self.check = trainer.make_check()
        upstream.apply_liger(trainer.model, trainer.args)
        cast_inputs_once(trainer.model, trainer.accelerator.device.type)
        if (layers := module_of("compiled", "layers")) is not None:
            for model in trainer.flat_models():  # those that an earlier trainer has compiled are eager again
                layers.make_eager(trainer.flat_base(model))
        with trainer.as_it_trains(trainer.args):
            self.models = self.check.install(trainer.flat_models())
        self.trained = self.models[0]
        self._compile(trainer.flat_models(), proves=not self.check.unproven)
        warn_of_dropout(self.trained.model, trainer.args)

    def prove(self, trainer: "FlatTrainer", model: torch.nn.Module) -> None:
        """Prove a model before it first computes anything, if it had no weights when the trainer was made."""
        unproven = self.check.unproven
        if not unproven or (base := trainer.flat_base(model)) not in unproven:
            return
        unproven.remove(base)
        models = [model]
        if base is self.trained.model:  # all others have their weights by now, too
            unproven.clear()
            models += trainer.flat_models()[1:]
        chosen = self.trained.route
        with trainer.as_it_trains(trainer.args):
            proven = self.check.prove_all(models)
        self._compile(models)
        if chosen.prefix_sharing and not proven.prefix_sharing:
            raise UnprovenModelError(
                f"{type(self.trained.model).__name__} cannot share prefixes, which was found out after the first "
                "batches were made: set `prefix_sharing=False`."
            )

    def _compile(self, models: Models, proves: bool = True) -> None:
        """Compile the decoder layers of `models` if the accelerator has a compiler, and prove that they are exact."""
        if self.compiler is None:
            return
        layers = module_of("compiled", "layers")
        for model in models:
            if (flat_model := FlatModel.of(self.check.base_of(model))) is not None:
                if proves:
                    self.check.prove_again([model], layers.compiled(flat_model, self.compiler))
                layers.compile_layers(flat_model, self.compiler)

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
        return int(self.peers.largest([self.peak_memory.highest])[0])


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
    >>> trainer.flat = SimpleNamespace(pads=False)  # as a trainer's `__init__` sets it
    >>> trainer.rows()
    'flat, not padded'
    >>> trainer.flat.pads = True
    >>> trainer.rows()
    'padded'
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.flat.pads:
            return method(self, *args, **kwargs)
        owner = next(each for each in reversed(type(self).__mro__) if vars(each).get(method.__name__) is call)
        return getattr(super(owner, self), method.__name__)(*args, **kwargs)

    return cast(Method, call)
