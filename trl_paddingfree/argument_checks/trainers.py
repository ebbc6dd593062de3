"""What is checked of the arguments of all trainers."""

import torch
from transformers import Trainer

from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from .arguments import (
    refuse_classes,
    refuse_no_folder,
    refuse_no_padding_token,
    refuse_wrong_schedule,
    warn_of_no_steps,
    warn_of_precision,
)
from .given_models import refuse_frozen, refuse_unusable
from .values import DOCUMENTED, refuse_unknown_words, refuse_wrong_values


class ArgumentsChecked(FlatTrainer):
    """Refuses mistakes before models and data are loaded."""

    def refuse_at_once(self, arguments: Arguments) -> None:
        super().refuse_at_once(arguments)
        refuse_classes(arguments)

    def refuse_even_padded(self, arguments: Arguments) -> None:
        super().refuse_even_padded(arguments)
        refuse_wrong_values(arguments["args"])  # again: attributes may have been set since it was made
        if type(self).__module__.startswith("trl_paddingfree."):  # user-defined trainers may know more words
            for name in DOCUMENTED:
                refuse_unknown_words(arguments["args"], type(self), name)

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        refuse_no_folder(arguments["args"].output_dir)
        refuse_no_padding_token(arguments)
        optimizer, schedule = arguments.get("optimizers", (None, None))
        if schedule is None and type(self).create_scheduler is Trainer.create_scheduler:
            refuse_wrong_schedule(arguments["args"], optimizer)
        warn_of_no_steps(arguments["args"])
        refuse_unusable(arguments, self.trl_trainer.__name__ if self.trains_language_models else "")

    def before_flat(self) -> None:
        warn_of_precision(self.accelerator.mixed_precision, self.args)
        super().before_flat()

    def begin_training(self, model: torch.nn.Module) -> None:
        refuse_frozen(model)
        super().begin_training(model)


Collated = ArgumentsChecked
Online = ArgumentsChecked
