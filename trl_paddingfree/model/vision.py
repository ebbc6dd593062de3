"""Vision-language models: what they are told of a flat row's images, and which of them cannot be told.

The model merges its images itself. It is given its features in the order of the flat row's placeholders, the positions
that it counts itself over the rows, and the blocks of image tokens that see one another.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from ..flat.batch import FlatBatch
from ..flat.images import COUNTED_ROWS, FlatImages, VisionRules
from .architecture import config_value
from .restored import attributes_set

# As a model gives them: of all images, or of each
Features = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]
# Rows that a processor gives beside `input_ids`, and that the flat batch replaces
TYPE_ROWS = ("token_type_ids", "mm_token_type_ids")

_REFUSED = {
    "hunyuan_vl": "it counts positions of images by those of other rows of its batch, with padding",
    "mllama": "its text attends to images by cross-attention, row by row, and has no placeholders for them",
    "paligemma": "its attention is bidirectional over all that is not marked as a completion, and TRL does not mark it",
}


def vision_rules(model: PreTrainedModel) -> VisionRules:
    """The [`VisionRules`] of a model."""
    config = model.config  # not the processor: Gemma 3's calls another token its `image_token_id`
    row, types = "", tuple[int, ...]()
    if config.model_type == "gemma3":
        row, types = "token_type_ids", (1,)
    elif sees_both_ways(model):
        row, types = "mm_token_type_ids", (1, 2)
    # The others cut blocks where the window ends
    longest = config.get_text_config().sliding_window if config.model_type == "gemma4_unified" else None
    counts_grids = hasattr(model.base_model, "get_rope_index")  # Qwen's backbones have it, without a common class
    return VisionRules(config.image_token_id, row, types, longest_block=longest, counts_grids=counts_grids)


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model's backbone has a vision tower whose features it merges."""
    return hasattr(model.base_model, "get_image_features")  # no class stands for this


def sees_both_ways(model: PreTrainedModel) -> bool:
    """Whether tokens of an image see one another in both directions."""
    says = config_value(model.config.get_text_config(), "use_bidirectional_attention")
    return model.config.model_type == "gemma3" or says == "vision"


def why_no_images(model: PreTrainedModel) -> str:
    """Why `model` cannot train on images without padding, whatever a check would say; empty if that has to be tried."""
    config, backbone = model.config, model.base_model
    if reason := _REFUSED.get(config.model_type):
        return reason
    if backbone is model:
        return f"it has no backbone under its `base_model_prefix` ({model.base_model_prefix!r}), where TRL wants it"
    if not takes_images(model):
        return "its backbone has no `get_image_features`, by which images would reach the flat row"
    if config_value(config, "image_token_id") is None:
        return "its configuration names no `image_token_id`"
    return ""


def features_in_order(model: Any, images: FlatImages) -> AbstractContextManager[None]:
    """Within this context, the model gets the features of its images in the order of the flat row's placeholders."""
    backbone = model.base_model
    features_of = backbone.get_image_features

    def get_image_features(*args: object, **kwargs: object) -> ModelOutput:
        outputs = features_of(*args, **kwargs)
        outputs.pooler_output = _ordered(outputs.pooler_output, images)
        if vars(outputs).get("deepstack_features") is not None:
            outputs.deepstack_features = [_ordered(level, images) for level in outputs.deepstack_features]
        return outputs

    return attributes_set([(backbone, "get_image_features", get_image_features)])


def _ordered(features: Features, images: FlatImages) -> Features:
    """Features in the order of the placeholders, in the form that the model gave them: a tensor, a tuple or a list."""
    parts = features if isinstance(features, list | tuple) else [features]
    flat = torch.cat([part.reshape(-1, part.size(-1)) for part in parts])
    if len(flat) != images.num_features:
        # TRL knows the first words, and says then that `max_length` cuts an image
        raise ValueError(
            f"Image features and image tokens do not match, tokens: {images.num_features}, features: {len(flat)}"
        )
    if images.feature_index is None:
        return features
    flat = flat.index_select(0, images.feature_index.to(flat.device))
    if isinstance(features, list | tuple):
        return type(features)([flat])
    return flat if features.dim() == 2 else flat[:, None]


def flat_positions(model: Any, batch: FlatBatch) -> torch.Tensor:
    """Positions of the flat tokens: `(1, T)`, or `(3, 1, T)` where the model counts them by the images' grids."""
    images = batch.images
    if images is None or not images.grids:
        return batch.position_ids

    def count() -> torch.Tensor:  # by the model's own function, on the CPU: it asks for each grid's numbers
        device = batch.row_index.device
        # Rows come in copies of equal images, whose grids are there once
        rows = {name: x.chunk(images.copies) for name, x in images.grids.items() if name in COUNTED_ROWS}
        grids = {name: x for name, x in images.grids.items() if name not in rows}
        copies = [dict(zip(rows, copy, strict=True)) for copy in zip(*rows.values(), strict=True)]
        per_copy = [model.base_model.get_rope_index(**copy, **grids)[0] for copy in copies]
        positions = torch.zeros(3, batch.input_ids.size(1) + 1, dtype=torch.long, device=device)
        index = batch.row_index.masked_fill(~batch.row_mask, batch.input_ids.size(1))
        positions[:, index.flatten()] = torch.cat(per_copy, dim=1).to(device, non_blocking=True).flatten(1)
        return positions[:, None, :-1]

    return batch.layout.derived("grid positions", count)
