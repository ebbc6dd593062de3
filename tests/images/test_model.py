"""What a vision-language model says of flat rows with images, outside of TRL's head."""

import pytest
import torch

from tests.helpers.architectures import with_head
from tests.helpers.tiny import SEED
from tests.helpers.vision import make_vision, vision_completions
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.images.collate import VisionLanguageModelingCollator
from trl_paddingfree.images.model import vision_rules

# float32 (eps = 1.2e-7), relative to the largest logit: sums over at most a few hundred terms
FLOAT32 = 2e-5
KINDS = ["gemma3", "qwen2_5_vl", "qwen3_5", "gemma4"]


@pytest.mark.parametrize("backend", ["segment", "mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_of_rows_with_images_are_those_of_padded_rows(kind, backend):
    model, processor = make_vision(kind, seed=SEED)
    with_head(model).eval()
    collator = VisionLanguageModelingCollator(
        processor, completion_only_loss=True, padding_free=True, prefix_sharing=True, rules=vision_rules(model)
    )
    rows = [*vision_completions(4, SEED)]
    padded, flat = collator.padded(rows), collator(rows)
    FlatModel.install(model, Route(backend, "sdpa", prefix_sharing=True))
    with torch.no_grad():
        expected, actual = model(**padded), model(**flat)
        logits = model(**{name: value for name, value in flat.items() if name != "labels"}).logits
    tokens = padded["attention_mask"].bool()
    allowed = FLOAT32 * expected.logits.abs().max()
    assert (actual.logits - expected.logits)[tokens].abs().max() <= allowed
    assert (logits - expected.logits)[tokens].abs().max() <= allowed
    assert abs(actual.loss - expected.loss) <= FLOAT32 * abs(expected.loss)
