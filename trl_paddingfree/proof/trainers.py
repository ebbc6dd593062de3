"""When a trainer looks at the batches that it trains on, and what it says of them: `check_steps`."""

from dataclasses import asdict
from typing import Any

import torch
from accelerate.utils import gather
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..core.check.prove import UnprovenModelError
from ..core.flat.batch import FlatBatch, Inputs
from ..core.model.flat_model import FlatModel
from ..core.model.restored import Change, attributes_set
from ..core.trainers.base import FlatTrainer
from ..core.trainers.card import append_to_card
from ..core.trainers.engine import is_sharded
from ..core.trainers.runtime import when_flat
from .certificate import Certificate, conclude
from .look import Rows, look


class Looks(TrainerCallback, ExportableState):
    """
    Looks at the first micro-batch of a run, and at that of every `check_steps` optimizer steps, before anything is
    learnt of it: at the first call with gradients of the model that trains, and the first one without of each model.

    What it counts is in the trainer's state, and so in `trainer_state.json`.
    """

    def __init__(self, trainer: "Looking"):
        self.trainer = trainer
        self.found = Certificate()
        self.logged_error: float | None = None  # the largest since the last log
        self.is_first = True
        self.hooks: list[Any] = []
        self.forwards: list[Change] = []  # of models, which distillation replaces for the time of a call
        self.seen: set[tuple[int, bool, bool]] = set()  # which calls of the current step it has looked at
        self.is_looking = False  # within a look, which calls the models, too
        self.mistake = ""  # that a look has found, in words, whoever has caught its error

    def state(self) -> dict[str, Any]:
        """What is saved with a checkpoint."""
        return {"args": {}, "attributes": asdict(self.found)}

    def on_train_begin(self, args, state, control, **kwargs):
        self.is_first, self.mistake, self.logged_error = True, "", None
        # Runs that looked at nothing leave none in their checkpoints, and transformers saves to what it finds
        resumed = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            self.found = Certificate.of(resumed["attributes"])

    def on_step_begin(self, args, state, control, **kwargs):
        self.refuse_to_go_on()
        self.forget()  # of a step that did not end, such as one that `auto_find_batch_size` tries again
        every = self.trainer.runtime.options.check_steps  # which may be 0 by now
        if every and (self.is_first or state.global_step % every == 0):
            self.is_first = False
            models = dict.fromkeys([self.trainer.model_wrapped, *self.trainer.flat_models()[1:]])
            # Without adapters, TRL calls the model within its wrapper: the reference. DeepSpeed gathers weights for the
            # calls that it knows
            if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
                models[self.trainer.model] = None
            bases = map(self.trainer.accelerator.unwrap_model, models)
            self.forwards = [(base, "forward", base.forward) for base in bases]
            self.hooks = [
                model.register_forward_pre_hook(self._on_call, with_kwargs=True, prepend=True) for model in models
            ]

    def on_step_end(self, args, state, control, **kwargs):
        self.forget()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.refuse_to_go_on()

    def refuse_to_go_on(self) -> None:
        """Raise the mistake that a look has found, again if a `training_step` of the user's has caught it."""
        if self.mistake:
            raise UnprovenModelError(self.mistake)

    def on_substep_end(self, args, state, control, **kwargs):
        self.forget()  # the first micro-batch of a step is enough

    def forget(self) -> None:
        """Look at no more calls of this step."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.seen.clear()

    def _on_call(self, call: torch.nn.Module, args: tuple, kwargs: Inputs) -> None:
        if self.is_looking or not self.trainer.runtime.has_begun:  # a check that has waited for weights calls it, too
            return
        try:
            with attributes_set([*self.forwards, (self, "is_looking", True)]):
                self._look_at_call(call, args, kwargs)
        except BaseException:  # else, what distillation has put there for the time of the call would stay
            for model, name, forward in self.forwards:
                vars(model)[name] = forward
            raise

    def _look_at_call(self, call: torch.nn.Module, args: tuple, kwargs: Inputs) -> None:
        flat_model, trains = FlatModel.of(call), torch.is_grad_enabled()
        alone = self.trainer.accelerator.num_processes == 1  # several must look equally often
        if flat_model is None or ((id(flat_model), trains, False) in self.seen and not alone):
            return
        with torch.no_grad():  # rows that become flat with gradients count as trained
            found = self.trainer.rows_of_call(flat_model, args, kwargs)
        if found is None:
            return
        # Parts of a micro-batch come one after another, those with images last
        key = id(flat_model), trains, alone and bool(found[1].hooks)
        if key not in self.seen:
            self.seen.add(key)
            self.look(flat_model, call, *found, trains=trains)

    def look(
        self, flat_model: FlatModel, call: torch.nn.Module, inputs: Inputs, batch: FlatBatch, trains: bool
    ) -> None:
        """Look at one call, and raise an [`UnprovenModelError`] if any process has found a mistake."""
        trainer, check = self.trainer, self.trainer.runtime.check
        # Where weights are gathered in each pass, or slices exchanged, all processes compute equally many
        together = is_sharded(trainer.accelerator) or flat_model.peers.name
        skipped = check.why_no_gradients(call) if trains else ""
        rows = Rows(
            flat_model,
            call.module if isinstance(call, DistributedDataParallel) else call,
            inputs,
            batch,
            trains=trains,
            skipped=skipped,
            seed=trainer.state.global_step,
            largest=(lambda number: int(self._gathered([number]).max())) if together else int,
        )
        with check.in_precision():  # the call itself is about to enter it
            looked = look(rows, check.all_agree)
        for each in trainer.runtime.models:
            for hook in each.hooks:
                hook.interrupted()
        # The processes of a group have the same rows
        error, messages = self.found.add(
            looked, self._gathered, trainer.accelerator.num_processes // trainer.num_streams
        )
        if error >= 0:
            self.logged_error = max(self.logged_error or 0.0, error)
        self.mistake = conclude(
            flat_model,
            looked,
            messages,
            by="`check_steps`",
            of_what=f"the micro-batch before step {trainer.state.global_step + 1}",
            advice="Set `padding_free=False` to train with padding, or another `flat_attention`. Nothing was learnt "
            "from this micro-batch, and earlier checkpoints stay.",
        )
        self.refuse_to_go_on()

    def _gathered(self, numbers: list[float]) -> torch.Tensor:
        """Those of all processes. Not by the accelerator, which gathers nothing while it computes a part."""
        return gather(torch.tensor([[*map(float, numbers)]], device=self.trainer.accelerator.device)).cpu()


class Looking(FlatTrainer):
    """Looks at batches that train."""

    _looks: Looks | None = None  # once training has begun

    @when_flat
    def train(self, *args, **kwargs):
        if self._looks is None and self.runtime.options.check_steps:
            self._looks = Looks(self)
            self.add_callback(self._looks)
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._looks is not None:
                self._looks.forget()

    def _load_callback_state(self) -> None:
        """Restores the other callbacks: transformers would make this one anew, without its trainer."""
        states: Any = self.state.stateful_callbacks
        saved = states.pop(Looks.__name__, None)
        super()._load_callback_state()
        if saved is not None:
            states[Looks.__name__] = saved

    def logged_figures(self) -> dict[str, float]:
        figures, looks = super().logged_figures(), self._looks
        if looks is None or looks.logged_error is None:
            return figures
        error, looks.logged_error = looks.logged_error, None
        return figures | {"flat/check_error": error}

    @when_flat
    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero() and self._looks is not None and (said := str(self._looks.found)):
            append_to_card(self.args.output_dir, f"\nWhile it trained, {said}\n")


Collated = Looking
Online = Looking
