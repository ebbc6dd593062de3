"""The base of the trainers with a collator, with what capabilities add to it."""

from typing import TYPE_CHECKING

from ...capabilities import classes_of
from .collated import Collated

if TYPE_CHECKING:  # the same bases, for editors and type checkers
    from ...answers.trainers import Collated as AnswersCollated
    from ...argument_checks.trainers import Checked as ArgumentsChecked
    from ...arranging.trainers import Collated as ArrangingCollated
    from ...budgets.trainers import Collated as BudgetsCollated
    from ...compiled.trainers import Compiling
    from ...data_checks.trainers import Collated as CheckedCollated
    from ...groups.trainers import Collated as GroupsCollated
    from ...images.trainers import Collated as ImagesCollated
    from ...own_collators.trainers import Collated as OwnCollated
    from ...proof.trainers import Proof
    from ...remembering.trainers import Remembering
    from ...resuming.trainers import Resuming

    class CollatedTrainer(
        Resuming,
        Remembering,
        AnswersCollated,
        ArgumentsChecked,
        CheckedCollated,
        Proof,
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
