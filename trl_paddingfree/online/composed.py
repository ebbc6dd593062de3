"""The base of the trainers that generate, with what capabilities add to it."""

from typing import TYPE_CHECKING

from ..capabilities import classes_of
from .base import Online

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ..answers.trainers import Online as AnswersOnline
    from ..argument_checks.trainers import Checked as ArgumentsChecked
    from ..arranging.trainers import Online as ArrangingOnline
    from ..budgets.trainers import Online as BudgetsOnline
    from ..compiled.trainers import Compiling
    from ..data_checks.trainers import Online as CheckedOnline
    from ..groups.trainers import Online as GroupsOnline
    from ..images.trainers import Online as ImagesOnline
    from ..proof.trainers import Proof
    from ..remembering.trainers import Remembering
    from ..resuming.trainers import Resuming

    class OnlineTrainer(
        Resuming,
        Remembering,
        AnswersOnline,
        ArgumentsChecked,
        CheckedOnline,
        Proof,
        ImagesOnline,
        GroupsOnline,
        Compiling,
        BudgetsOnline,
        ArrangingOnline,
        Online,
    ):
        pass
else:

    class OnlineTrainer(*classes_of("trainers", "Online"), Online):
        __doc__ = Online.__doc__
