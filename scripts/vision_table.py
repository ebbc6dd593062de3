"""The second table of docs/models.md: what vision-language models make of images without padding."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import is_torchvision_available
from trl.trainer.utils import add_fused_lm_head

from scripts.model_table import markdown
from tests.helpers.vision import ARCHITECTURES, make_vision, vision_pairs
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.images.check import ImageProbe, ImagesAlone, check_images
from trl_paddingfree.images.collate import VisionPreferenceCollator
from trl_paddingfree.images.model import vision_rules, why_no_images

COLUMNS = ("vision-language model", "verdict", "segment", "mask", "leak, of an effect of")
HEADING = """
## Images

This is the same check for vision-language models, on examples with images. The trainers run it on the first examples of
your data. `python scripts/models.py --vision --output docs/models.md` wrote this table, with torchvision.

- The first figure under a backend is the largest difference between log-probabilities, with shared prefixes and with
  padded TRL on each example alone. The second is the most that the model's own rounding explains.
- The **leak** is how much rows move when the images of other rows are inverted. The **effect** is how much they move
  when their own images are.
- `python -m pytest -m models tests/images` trains all of these models beside padded TRL, in six
  trainers.
"""
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
REFUSED: dict[str, dict[str, Any]] = {
    "llama4": {"vision_config": {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16}},
    "mllama": {"vision_config": {**_TOWER, "num_global_layers": 1, "vision_output_dim": 16, "attention_heads": 2}},
    "paligemma": {"vision_config": {**_TOWER, "model_type": "siglip_vision_model"}},
}


def refused_model(model_type: str) -> Any:
    """A model without weights of an architecture that cannot train on images."""
    text = {"vocab_size": 90, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "cross_attention_layers": []}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, text_config=text, **REFUSED[model_type])
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def vision_row(kind: str) -> list[str]:
    """One row of the table."""
    model, processor = make_vision(kind)
    add_fused_lm_head(model)
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=vision_rules(model))
    probe = ImageProbe(collator, vision_pairs(6, 0))
    routes = [Route(backend, "sdpa", prefix_sharing=True) for backend in ("segment", "mask")]
    segment, mask = results = [check_images(model, route, ImagesAlone(model, probe)) for route in routes]
    verdict = "flat and shared" if segment.passed and mask.passed else f"refused: {segment}"
    figures = [f"{result.error:.0e} of {result.tolerance:.0e}" for result in results]
    return [kind, verdict, *figures, f"{segment.leak:.0e} of {segment.effect:.0e}"]


def vision_section() -> str:
    """The section of the page."""
    if not is_torchvision_available():
        raise ImportError("The table of vision-language models needs torchvision: `pip install torchvision`.")
    rows = [vision_row(kind) for kind in ARCHITECTURES]
    rows += [[kind, f"refused: {why_no_images(refused_model(kind))}", *[""] * 3] for kind in REFUSED]
    return markdown(rows, HEADING, COLUMNS)
