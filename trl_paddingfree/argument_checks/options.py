"""What is checked of a configuration when it is made."""

from dataclasses import dataclass

from ..core.trainers.options import CoreOptions
from .values import refuse_wrong_values


@dataclass
class Options(CoreOptions):
    """No options of its own."""

    def check_values(self) -> None:
        super().check_values()
        refuse_wrong_values(self)
