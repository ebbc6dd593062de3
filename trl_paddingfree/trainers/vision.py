"""What a trainer does with data that has images."""

from dataclasses import replace
from typing import Any

from ..data.image_probe import ImageProbe
from ..model.vision import vision_rules
from .refusals import refuse_blind


def flat_collator(trainer: Any) -> Any:
    """
    The trainer's collator, such that it gives flat batches. A copy: the user's own may serve another trainer.

    Raises:
        `ValueError`: If the data has images, and the model cannot take them from a flat row.
    """
    collator, wanted = trainer.data_collator, trainer.collator_of(trainer._is_vision_dataset)
    if not isinstance(collator, wanted):
        collator = wanted(**vars(collator))
    options: dict[str, Any] = {"padding_free": True, "max_tokens": None}
    if trainer._is_vision_dataset:
        model = trainer.flat_base(trainer.model)
        refuse_blind(model)
        options["rules"] = vision_rules(model)
    return replace(collator, **options)


def images_to_try(trainer: Any, collator: Any) -> ImageProbe | None:
    """The first examples with images, as `collator` will get them; `None` for text."""
    if not trainer._is_vision_dataset:
        return None
    trainer._set_signature_columns_if_needed()
    kept = trainer._signature_columns if trainer.args.remove_unused_columns else None
    rows = ({k: v for k, v in row.items() if kept is None or k in kept} for row in trainer.train_dataset)
    return ImageProbe(collator, rows)
