"""How the models of a trainer become flat: they are proven, at once or when they have their weights."""

from typing import TYPE_CHECKING

import torch

from .. import upstream
from ..check.prove import UnprovenModelError
from ..model.casts import cast_inputs_once
from .refusals import refuse_adapters, warn_of_dropout

if TYPE_CHECKING:
    from .base import FlatTrainer


def start(trainer: "FlatTrainer") -> None:
    """Prove the models of a `trainer`, and have them compute flat batches."""
    flat, models = trainer.runtime, trainer.flat_models()
    refuse_adapters(models)
    flat.check = trainer.make_check()
    upstream.apply_liger(trainer.model, trainer.args)
    cast_inputs_once(trainer.model, trainer.accelerator.device.type)
    with trainer.as_it_trains(trainer.args):
        flat.models = flat.check.install(models)
    flat.trained = flat.models[0]
    trainer.after_flat(models, are_proven=not flat.check.unproven)
    warn_of_dropout(flat.trained.model, trainer.args)


def prove(trainer: "FlatTrainer", model: torch.nn.Module) -> None:
    """Prove a `model` before it first computes anything, if it had no weights when the trainer was made."""
    flat, base = trainer.runtime, trainer.flat_base(model)
    unproven = flat.check.unproven
    if base not in unproven:
        return
    models = [model]
    if base is flat.trained.model:  # all others have their weights by now, too
        models += trainer.flat_models()[1:]
    chosen = flat.trained.route
    with trainer.as_it_trains(trainer.args):
        proven = flat.check.prove_all(models)
    trainer.after_flat(models, are_proven=True)
    if chosen.prefix_sharing and not proven.prefix_sharing:
        for each in models:
            flat.check.installed(flat.check.base_of(each), chosen)  # whoever calls again is refused again
        raise UnprovenModelError(
            f"{type(flat.trained.model).__name__} cannot share prefixes, which was found out after the first batches "
            "were made: set `prefix_sharing=False`."
        )
    flat.check.unproven = [] if base is flat.trained.model else [each for each in unproven if each is not base]
