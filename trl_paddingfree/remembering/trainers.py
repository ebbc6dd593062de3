"""What remembering adds to the trainers: verdicts of earlier starts, in the user's cache and in checkpoints."""

from ..core.trainers.base import FlatTrainer
from .verdicts import Remembered


class Remembering(FlatTrainer):
    """The start-up check takes over verdicts, and checkpoints have those of their run."""

    _remembered: Remembered | None = None  # of a trainer that does not pad

    def earlier_verdicts(self) -> Remembered:
        self._remembered = Remembered(self.args.output_dir)
        return self._remembered

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # makes the folder
        if self.args.should_save and self._remembered is not None:
            self._remembered.save(output_dir)


Collated = Remembering
Online = Remembering
