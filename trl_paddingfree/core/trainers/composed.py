"""The base of the trainers with a collator, with what capabilities add to it."""

from typing import TYPE_CHECKING

from ...capabilities import classes_of
from .collated import Collated

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ...answers.trainers import AnswersCollated
    from ...argument_checks.trainers import ArgumentsChecked
    from ...arranging.trainers import ArrangingCollated
    from ...budgets.trainers import BudgetsCollated
    from ...compiled.trainers import Compiling
    from ...data_checks.trainers import DataCheckedCollated
    from ...groups.trainers import GroupsCollated
    from ...images.trainers import ImagesCollated
    from ...own_collators.trainers import OwnCollated
    from ...proof.trainers import Looking
    from ...remembering.trainers import Remembering
    from ...resuming.trainers import Resuming

    class CollatedTrainer(
        Resuming,
        Remembering,
        AnswersCollated,
        ArgumentsChecked,
        DataCheckedCollated,
        Looking,
        ImagesCollated,
        GroupsCollated,
        Compiling,
        BudgetsCollated,
        ArrangingCollated,
        OwnCollated,
        Collated,
    ):
        pass
else:

    class CollatedTrainer(*classes_of("trainers", "Collated"), Collated):
        __doc__ = Collated.__doc__
