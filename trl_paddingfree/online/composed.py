"""The base of the trainers that generate, with what capabilities add to it."""

from typing import TYPE_CHECKING

from ..capabilities import classes_of
from .base import Online

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ..answers.trainers import AnswersOnline
    from ..argument_checks.trainers import ArgumentsChecked
    from ..arranging.trainers import ArrangingOnline
    from ..budgets.trainers import BudgetsOnline
    from ..compiled.trainers import Compiling
    from ..data_checks.trainers import DataCheckedOnline
    from ..groups.trainers import GroupsOnline
    from ..images.trainers import ImagesOnline
    from ..proof.trainers import Looking
    from ..remembering.trainers import Remembering
    from ..resuming.trainers import Resuming

    class OnlineTrainer(
        Resuming,
        Remembering,
        AnswersOnline,
        ArgumentsChecked,
        DataCheckedOnline,
        Looking,
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
