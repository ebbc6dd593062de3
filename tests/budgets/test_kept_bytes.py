"""What is counted as kept for the backward pass."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.reference_flash import varlen_on
from tests.helpers.tiny import ATTENTIONS, SHARING, make_model
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.features import ALL_PAIRS, KEYS, TOKENS, memory_features
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.budgets.saved_bytes import SavedBytes
from trl_paddingfree.core.model.casts import cast_inputs_once
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.recomputable import recomputable_layers


def test_only_what_the_backward_pass_still_needs_is_counted():
    model = make_model()
    layers = recomputable_layers(model)
    counter, tokens = SavedBytes(model, layers), torch.arange(12)[None]

    def counted():
        return sum(counter.total(layer) for layer in range(-1, len(layers)))

    with counter.counting():
        with torch.no_grad():  # a reference model's pass, whose memory is free again
            model(tokens, use_cache=False)
        assert counted() == 0
        output = model(tokens, use_cache=False)
        once = counted()
        assert once > 0
        again = model(tokens, use_cache=False)
        assert counted() > 1.9 * once
        del again
        assert counted() < 1.1 * once  # what layers were given stays
        del output
    assert counted() < 0.1 * once


@SHARING
@ATTENTIONS
def test_short_segments_keep_the_bytes_that_are_predicted(attention, prefix_sharing):
    """One long segment, short ones that start together, and short ones of one length that start here and there."""
    model, route = make_model(), Route("segment", attention, prefix_sharing)
    model.set_attn_implementation(attention)
    FlatModel.install(with_head(model), route)
    per_feature = count_kept_bytes(model, route)
    draws = torch.Generator().manual_seed(0)

    def tokens(number):
        return torch.randint(1, model.config.vocab_size, (number,), generator=draws).tolist()

    prompt = tokens(150)
    rows = [prompt, *(prompt[:40] + tokens(2 * n) for n in range(3, 12)), *(prompt[:n] + tokens(9) for n in range(9))]
    batch = FlatBatch.from_rows(rows, rows, prefix_sharing=prefix_sharing)
    counter = SavedBytes(model, recomputable_layers(model))
    with counter.counting():
        output = model(input_ids=batch.input_ids[0][batch.row_index], flat_batch=batch, use_cache=False)
    kept = [counter.total(layer) for layer in range(len(per_feature.kept))]
    del output
    predicted = per_feature.factor * (per_feature.kept @ memory_features(batch, route))
    assert (predicted >= kept).all()
    assert (predicted <= 1.2 * np.array(kept)).all()


# Llama 3 8B, an eighth as wide: what a layer keeps is as wide as its states, but for numbers of one per token and head
WIDTH = 8
LAYER = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1}
LENGTH = 200


@pytest.mark.parametrize(("once", "kilobytes"), [(False, 217), (True, 185)], ids=["twice", "once"])
def test_a_layer_keeps_15_percent_less_of_a_token(once, kilobytes):
    model, route = make_model(dtype=torch.bfloat16, **LAYER), Route("varlen", "sdpa", prefix_sharing=False)
    FlatModel.install(with_head(model), route)
    adapters = get_peft_model(model, LoraConfig(r=16 // WIDTH, target_modules="all-linear"))
    adapters.enable_input_require_grads()
    if once:
        cast_inputs_once(adapters, "cpu")
    with varlen_on(), torch.autocast("cpu", torch.bfloat16):
        kept = count_kept_bytes(model, route).kept
    sizes = memory_features(FlatBatch.from_rows([[1] * LENGTH], [[1] * LENGTH], prefix_sharing=False), route)
    sizes[0] = 0  # of any number of tokens
    assert kept @ sizes * WIDTH / LENGTH / 1e3 == pytest.approx([kilobytes] * 2, rel=0.01)


def test_scores_that_a_device_keeps_are_charged_to_pairs_and_not_to_keys():
    """Where SDPA has no kernel without scores, a token of a long row would cost seven times that of a short one."""
    model, route = make_model(), Route("segment", "sdpa", True)
    FlatModel.install(with_head(model), route)
    fused = count_kept_bytes(model, route)
    with sdpa_kernel(SDPBackend.MATH):
        scores = count_kept_bytes(model, route)
    assert not fused.kept[:, ALL_PAIRS].any()
    # The probabilities of four heads in float32, of every pair
    np.testing.assert_allclose(scores.kept[:, ALL_PAIRS], 4 * 4, rtol=1e-6)
    assert scores.largest[ALL_PAIRS] >= 4 * 4
    # What both keep of tokens are the same tensors, but for copies of keys and values, one per head
    assert (scores.kept[:, [TOKENS, KEYS]].sum(1) < 1.2 * fused.kept[:, [TOKENS, KEYS]].sum(1)).all()
    assert scores.factor < 1.3


@pytest.mark.parametrize("positions", [256, 448, 512, 600])
def test_models_of_few_positions_are_counted_within_them(positions):
    model = tiny_model("gpt2", n_positions=positions)
    route = Route("segment", "sdpa", prefix_sharing=True)
    FlatModel.install(with_head(model), route)
    assert count_kept_bytes(model, route).kept.any()
