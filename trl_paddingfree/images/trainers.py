"""What images add to the trainers: their collators, their proof, and the images of rows that are generated."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import ProcessorMixin

from ..core.data.collate import FlatCollator
from ..core.data.lengths import has_images, has_known_lengths
from ..core.flat.batch import Inputs
from ..core.model.architecture import takes_images
from ..core.model.flat_model import Flattener
from ..core.model.restored import random_state_restored
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.proving import ExtraProof
from .check import MADE_UP, ImageProbe, ImageProof
from .collate import FlatVisionCollator, VisionLanguageModelingCollator, vision_collator
from .cuts import IMAGE_ARGUMENTS, split_by_row
from .examples import first_examples, made_up_examples, prompt_in_messages
from .generated import GeneratedImages
from .model import rules_of_all, why_no_images
from .rows import VisionRules


class Images(FlatTrainer):
    """What all trainers on images have in common."""

    _image_proof: ImageProof | None = None  # of the start-up check; `None` for text

    def refuse_images(self, arguments: Arguments) -> None:
        if vision_collator(self.task) is None:
            super().refuse_images(arguments)

    def image_rules(self) -> VisionRules:
        """How the models treat images, which flat batches have to follow."""
        return rules_of_all([self.flat_base(model) for model in self.flat_models()])

    def images_to_try(self) -> ImageProbe | None:
        """Examples with images for the check; `None` for text."""
        raise NotImplementedError

    def proofs(self) -> Sequence[ExtraProof]:
        probe = self.images_to_try()
        self._image_proof = None if probe is None else ImageProof(probe)
        return [*super().proofs(), *filter(None, [self._image_proof])]

    @property
    def tried_images(self) -> ImageProbe | None:
        """The examples that the start-up check has tried images on; `None` for text, and if they cannot be tried."""
        return None if self._image_proof is None else self._image_proof.probe

    def refuse_untried_images(self) -> None:
        """Refuse streams and transforms whose first examples have no image to check. Other data was searched whole."""
        if not has_known_lengths(self.train_dataset):
            raise ValueError(
                "The first examples of the train data have no images, so that the model's images cannot be tried: "
                "shuffle the data, or set `padding_free=False`."
            )

    def batches_beside_text(self) -> list[Inputs]:
        if (probe := self.tried_images) is None:
            return super().batches_beside_text()  # type: ignore[misc]
        if not probe.names:
            raise ValueError(
                f"`memory_budget={self.runtime.options.memory_budget}`: no example of the train data has an image in "
                "its column, so what the vision tower keeps is not known. Remove the column, or leave `memory_budget` "
                "out."
            )
        sharing = self.runtime.trained.route.prefix_sharing
        kinds = (["first"], ["second"], ["first", "second"])  # of different images: each alone, and both
        return [probe.batch(x, sharing) for x in kinds if probe.examples.keys() >= {*x}]


class ImagesCollated(Images, collated.Collated):
    """For trainers with a collator."""

    def collator_of(self, with_images: bool) -> type[FlatCollator]:
        return (vision_collator(self.task) if with_images else None) or super().collator_of(with_images)

    def _flat_collator(self) -> FlatCollator:
        collator = super()._flat_collator()
        return collator.changed(rules=self.image_rules()) if isinstance(collator, FlatVisionCollator) else collator

    def collated_with(self) -> dict[str, Any]:
        tried = {} if self.tried_images is None else {"is_tried": bool(self.tried_images.names)}
        return super().collated_with() | tried

    def images_to_try(self) -> ImageProbe | None:
        """The first examples with images, as the collator will get them; `None` for text."""
        collator = self._flat_collator()
        if not isinstance(collator, FlatVisionCollator):
            return None
        self._set_signature_columns_if_needed()
        columns = self._signature_columns if self.args.remove_unused_columns else None
        with random_state_restored(self.model):  # transforms of the data may draw
            examples = (collator.read_as.examples([each]) for each in first_examples(self.train_dataset, columns))
            probe = ImageProbe(collator, (first for first, *_ in examples))
        if not probe.names:
            self.refuse_untried_images()
        return probe


class ImagesOnline(Images):
    """For trainers that generate their rows. Comes before [`~trl_paddingfree.online.base.Online`]."""

    environment_factories: Any  # set by TRL's trainers

    @cached_property
    def _known(self) -> WeakTensorKeyDictionary:
        """The `GeneratedImages` of earlier passes, by `pixel_values`."""
        return WeakTensorKeyDictionary()

    def images_to_try(self) -> ImageProbe | None:
        """The first prompts with images, or made-up ones if only tools or environments add any; `None` for text."""
        data, processor = self.train_dataset, self.processing_class
        in_column = has_images(data)
        if not isinstance(processor, ProcessorMixin) or not (in_column or takes_images(self.flat_base(self.model))):
            if in_column:
                raise ValueError(
                    f"The data has images, and `processing_class` is a {type(processor).__name__}, which reads text "
                    "only: pass the model's processor, or remove the column of images."
                )
            return None
        collator = VisionLanguageModelingCollator(processor, padding_free=True)
        probe = ImageProbe(collator, map(prompt_in_messages, first_examples(data)))
        if (
            not probe.names
            and (vars(self).get("tools") or self.environment_factories)
            and not any(why_no_images(self.flat_base(model)) for model in self.flat_models())
        ):
            probe = ImageProbe(collator, made_up_examples(), MADE_UP)
        if not probe.names:
            if in_column:
                self.refuse_untried_images()
            return None
        probe.collator = collator.changed(rules=self.image_rules())
        return probe

    def flattener(self, inputs: Inputs) -> Flattener:
        """Each call of the model takes the images of its rows."""
        text: Flattener = super().flattener(inputs)  # type: ignore[misc]
        if (pixels := inputs.get("pixel_values")) is None:
            return text
        if (tried := self.tried_images) is None:
            raise ValueError(
                "The rows come with `pixel_values`, and the start-up check has tried no images, or could not: the "
                f"first prompts of the train data have none, and {type(self).__name__} has no tools or environments "
                "that return images which the model can compute. Shuffle the data, or set `padding_free=False`."
            )
        if pixels not in self._known:  # policy, reference and all iterations share them
            self._known[pixels] = GeneratedImages.of(inputs)
        if (images := copy(self._known[pixels])) is None:
            return text
        rules: Any = tried.collator.rules
        last: tuple[Any, Any] = None, None  # the rows of the last call, and their flat batch

        def flatten(input_ids, attention_mask, labels):
            nonlocal last
            if last[0] is not input_ids:  # asked twice for one call, as by what looks at it, images do not go on
                make = images.next(len(input_ids), rules).flatten
                last = input_ids, self.flatten(input_ids, attention_mask, labels, make)  # type: ignore[attr-defined]
            elif torch.is_grad_enabled():  # what looks at a call has asked before, without gradients
                self.runtime.counts.new.append(last[1].counts)
            return last[1]

        return flatten

    def beside_rows(self, inputs: Inputs) -> Inputs:
        images = {name: inputs[name] for name in IMAGE_ARGUMENTS if inputs.get(name) is not None}
        return super().beside_rows(inputs) | images  # type: ignore[misc]

    def split_by_row(self, batch: Inputs) -> Inputs:
        return split_by_row(batch)

    def kinds_of(self, rows: Inputs) -> Sequence[int]:
        """Of each row, the first one with equal images."""
        images = GeneratedImages.of(rows)
        return super().kinds_of(rows) if images is None else images.firsts  # type: ignore[misc]

    def refuse_small_budget(self, planner: Any) -> None:
        if self.tried_images is None:  # else, the number of image tokens is unknown
            super().refuse_small_budget(planner)  # type: ignore[misc]


Collated = ImagesCollated
Online = ImagesOnline
