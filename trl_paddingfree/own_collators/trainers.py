"""What collators of one's own add to the trainers: SFT takes any that pads."""

from typing import Any

from ..core.data.collate import FlatCollator, LanguageModelingCollator
from ..core.model.mixers import mixers
from ..core.trainers import collated
from ..padded import counts_by_mask
from .collate import PaddedRowsCollator


class OwnCollated(collated.Collated):
    """Has SFT on text take any collator that pads, whose rows have labels of their own."""

    def takes_collator(self, given: object, ours: type[FlatCollator]) -> bool:
        is_of_others = callable(given) and not isinstance(given, FlatCollator)
        return super().takes_collator(given, ours) or (is_of_others and issubclass(ours, LanguageModelingCollator))

    def flat_collator_of(self, collator: Any) -> FlatCollator:
        ours = self.collator_of(self._is_vision_dataset)
        if ours.flattens(collator) or not issubclass(ours, LanguageModelingCollator):
            return super().flat_collator_of(collator)
        model = self.flat_base(self.model)
        counts, carries = counts_by_mask(model), mixers().found(model)
        return PaddedRowsCollator(collate=collator, counts_by_mask=counts, carries_state=carries)

    @property
    def knows_lengths(self) -> bool:
        return not isinstance(self.data_collator, PaddedRowsCollator) and super().knows_lengths


Collated = OwnCollated
