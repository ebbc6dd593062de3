"""Vision-language models: the rules by which they read images in a row, and why some cannot read them in a flat row.

A model itself replaces placeholder tokens by image features. For a flat row, it gets the features in the order of the
placeholders, and positions that its own function counts in each row.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ..core.model.architecture import config_value, takes_images
from .rows import VisionRules

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_REFUSED = {
    "hunyuan_vl": "it counts positions of images by those of other rows of its batch, with padding",
    "mllama": "its text attends to images by cross-attention, row by row, and has no placeholders for them",
    "paligemma": "its attention is bidirectional over all that is not marked as a completion, and TRL does not mark it",
}


def vision_rules(model: PreTrainedModel) -> VisionRules:
    """The [`VisionRules`] of a model."""
    config = model.config  # not the processor's: in Gemma 3's, `image_token_id` is another token
    # In other models, a token sees its image within the window only
    longest = config.get_text_config().sliding_window if config.model_type == "gemma4_unified" else None
    patches = 0
    if hasattr(model.base_model, "get_rope_index"):  # Qwen's backbones have it, without a common class
        patches = (config_value(config_value(config, "vision_config"), "spatial_merge_size") or 1) ** 2
    return VisionRules(config.image_token_id, sees_both_ways(model), longest, patches)


def sees_both_ways(model: PreTrainedModel) -> bool:
    """Whether tokens of an image see one another in both directions."""
    says = config_value(model.config.get_text_config(), "use_bidirectional_attention")
    return model.config.model_type == "gemma3" or says == "vision"


def why_no_images(model: PreTrainedModel) -> str:
    """Why `model` cannot train on images without padding; empty if no reason is known."""
    config, backbone = model.config, model.base_model
    if reason := _REFUSED.get(config.model_type):
        return reason
    if backbone is model:
        return f"it has no backbone under its `base_model_prefix` ({model.base_model_prefix!r}), where TRL wants it"
    if not takes_images(model):
        return "its backbone has no `get_image_features`, by which images would reach the flat row"
    if config_value(config, "image_token_id") is None:
        return "its configuration names no `image_token_id`"
    for name, module in backbone.named_modules():
        if isinstance(module, BATCH_NORMS):  # TRL gives equal images to the tower once for each row
            return f"`{name}` takes statistics over all images of a call, and equal images are computed once"
    return ""


def rules_of_all(models: Sequence[PreTrainedModel]) -> VisionRules:
    """The rules of models that compute the same rows. Refuses those that cannot train on images, or that disagree."""
    names: dict[VisionRules, str] = {}  # the first model with each
    for model in models:
        if reason := why_no_images(model):
            raise ValueError(
                f"{type(model).__name__} cannot train on images without padding: {reason}. Set `padding_free=False`, "
                "or train another model."
            )
        names.setdefault(vision_rules(model), type(model).__name__)
    first, *others = names
    if others:
        raise ValueError(
            f"{names[others[0]]} and {names[first]} compute the same rows, and read images by other rules "
            f"({others[0]} and {first}): take models of one family, or set `padding_free=False`."
        )
    return first
