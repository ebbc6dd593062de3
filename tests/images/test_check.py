"""The start-up check of images: every known way in which they go astray is caught, and nothing else."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.architectures import with_head
from tests.helpers.tiny import SEED
from tests.helpers.vision import BUILDABLE, make_vision, vision_completions, vision_pairs
from trl_paddingfree.core.check.probe import tried_tokens
from trl_paddingfree.core.check.prove import UnprovenModelError
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.images.check import ImageProbe, ImagesAlone, check_images, prove_images
from trl_paddingfree.images.collate import VisionLanguageModelingCollator, VisionPreferenceCollator
from trl_paddingfree.images.model import vision_rules
from trl_paddingfree.images.rows import FlatImages, RowImages

SHARED = Route("segment", "sdpa", prefix_sharing=True)
# A mistake moves log-probabilities in the first digits, rounding in the seventh
LARGE = 1e-3


def make(kind, task="dpo"):
    model, processor = make_vision(kind, seed=SEED)
    with_head(model)
    collator_class, data = {
        "dpo": (VisionPreferenceCollator, vision_pairs),
        "sft": (VisionLanguageModelingCollator, vision_completions),
    }[task]
    return model, ImageProbe(collator_class(processor, padding_free=True, rules=vision_rules(model)), data(6, SEED))


@pytest.mark.parametrize("kind", BUILDABLE)
def test_no_row_of_text_is_drawn_from_placeholders(kind):
    model, _ = make_vision(kind)
    assert model.config.image_token_id not in tried_tokens(model)


@pytest.mark.parametrize("task", ["dpo", "sft"])
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_model_that_does_all_right_passes(kind, task):
    model, probe = make(kind, task)
    assert probe.names == ("first", "first, inverted", "second", "text")
    result = check_images(model, SHARED, ImagesAlone(model, probe))
    assert result.passed, result
    assert result.effect > LARGE


def caught(model, probe):
    result = check_images(model, SHARED, ImagesAlone(model, probe))
    assert not result.passed
    assert not result.failure
    assert result.error > LARGE
    return result


def index_of(images):
    return torch.arange(images.num_features) if images.feature_index is None else images.feature_index


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_features_in_another_order_are_caught(monkeypatch, kind):
    flat = RowImages.flat

    def rolled(self, *args):
        images = flat(self, *args)
        return replace(images, feature_index=index_of(images).roll(1))

    monkeypatch.setattr(RowImages, "flat", rolled)
    caught(*make(kind))


def test_positions_that_count_image_tokens_as_text_are_caught(monkeypatch):
    monkeypatch.setattr(FlatImages, "positions", lambda self, model, position_ids, layout: position_ids)
    caught(*make("qwen2_5_vl"))


def test_image_tokens_that_see_only_what_precedes_them_are_caught(monkeypatch):
    monkeypatch.setattr(RowImages, "blocks", lambda *_: None)
    caught(*make("gemma3"))


def test_features_in_another_order_where_rows_share_some_are_caught(monkeypatch):
    flat = RowImages.flat

    def swapped(self, rows, paths, tokens):
        images = flat(self, rows, paths, tokens)
        return images if len(tokens) == sum(map(len, rows)) else replace(images, feature_index=index_of(images).roll(1))

    monkeypatch.setattr(RowImages, "flat", swapped)
    model, probe = make("llava")
    caught(model, probe)
    # Without shared prefixes nothing is wrong: the trainer goes on with that
    assert not prove_images(model, SHARED, probe).prefix_sharing


@pytest.mark.parametrize("is_trained", [True, False])
def test_images_behind_a_projector_that_starts_at_zero_are_proven(monkeypatch, is_trained):
    model, probe = make("gemma3")
    projector = model.model.multi_modal_projector
    torch.nn.init.zeros_(projector.mm_input_projection_weight)  # as transformers makes it
    model.requires_grad_(is_trained)
    assert prove_images(model, SHARED, probe).effect > LARGE
    assert not projector.mm_input_projection_weight.any()
    monkeypatch.setattr(RowImages, "blocks", lambda *_: None)
    caught(model, probe)


def change_features(monkeypatch, model, change):
    """Has a model compute other features of its images: of those of all of them, what `change` makes."""
    features_of = model.model.get_image_features

    def changed(*args, **kwargs):
        outputs = features_of(*args, **kwargs)
        outputs.pooler_output = change(outputs.pooler_output)
        return outputs

    monkeypatch.setattr(model.model, "get_image_features", changed)


def test_images_that_never_arrive_are_caught(monkeypatch):
    model, probe = make("llava")
    change_features(monkeypatch, model, lambda features: [torch.zeros_like(x) for x in features])
    with pytest.raises(UnprovenModelError, match="make no difference to the model: they never arrive"):
        prove_images(model, SHARED, probe)


def test_images_that_leak_into_other_rows_are_caught(monkeypatch):
    model, probe = make("llava")
    change_features(monkeypatch, model, lambda features: [x + torch.cat(features).mean(0) for x in features])
    result = check_images(model, SHARED, ImagesAlone(model, probe))
    assert not result.isolated
    assert result.leak > LARGE
