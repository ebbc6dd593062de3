"""How many kernels a flat layer launches: a count, the same on every machine, and what a host-bound model pays for."""

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model

from scripts.benchmark.launches import Launches
from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import padded_rows
from tests.helpers.reference_flash import varlen_on
from tests.helpers.tiny import SHARING
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model.casts import cast_inputs_once
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route

MODELS = {"llama": None, "qwen3": "full_attention", "gemma3_text": "sliding_attention"}
# Two rows with a prefix in common, and one without
ROWS = [[5, 6, 7, 8, 9, 1], [5, 6, 7, 2], [4, 3, 3]]


@pytest.fixture(autouse=True)
def kernels():
    with varlen_on():
        yield


def launches(model_type: str, n_layers: int, prefix_sharing: bool | None, casts: int = 0) -> list[Counter[str]]:
    """
    What one pass launches forward and backward.

    Args:
        model_type (`str`), n_layers (`int`):
            The model, in bfloat16.
        prefix_sharing (`bool`, *optional*):
            Whether to share prefixes; `None`: padded.
        casts (`int`, *optional*, defaults to 0):
            How often inputs of adapters are cast under autocast; 0: there are no adapters.
    """
    kinds = {"layer_types": [MODELS[model_type]] * n_layers} if MODELS[model_type] else {}
    model = tiny_model(model_type, num_hidden_layers=n_layers, dtype=torch.bfloat16, **kinds).train()
    inputs = padded_rows(ROWS, ROWS)
    del inputs["labels"]
    if prefix_sharing is not None:
        FlatModel.install(model, Route("varlen", "sdpa", prefix_sharing=prefix_sharing))
        inputs["flat_batch"] = FlatBatch.from_rows(ROWS, ROWS, prefix_sharing=prefix_sharing)
    if casts:
        get_peft_model(model, LoraConfig(target_modules="all-linear")).enable_input_require_grads()
    if casts == 1:
        cast_inputs_once(model, "cpu")
    with Launches() as forward, torch.autocast("cpu", torch.bfloat16, enabled=bool(casts)):
        logits = model(**inputs, use_cache=False).logits
    with Launches() as backward:
        logits.sum().backward()
    return [Counter(forward.names), Counter(backward.names)]


def per_layer(model_type, prefix_sharing, casts=0):
    """Launches that one more layer adds, forward and backward."""
    fewer, more = (launches(model_type, n, prefix_sharing, casts) for n in (1, 2))
    return [b - a for a, b in zip(fewer, more, strict=True)]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_flat_layer_launches_no_more_than_a_padded_one_and_two_gathers_each_way(model_type):
    padded, flat, shared = (per_layer(model_type, sharing) for sharing in (None, False, True))
    assert all(ours.total() <= theirs.total() for ours, theirs in zip(flat, padded, strict=True))
    # Keys and values are copied to their queries, within our operator; copied again, and their gradients summed back
    assert [more - less for more, less in zip(shared, flat, strict=True)] == [
        Counter(),
        {"index_select": 2, "_embedding_bag_forward_only": 2},
    ]


@SHARING
def test_no_gradient_is_written_into_a_zeroed_copy(prefix_sharing):
    """That of `states[0]` is one: a full pass over memory for each of queries, keys, values and logits."""
    _, backward = launches("llama", 2, prefix_sharing)
    assert "select_backward" not in backward


def test_inputs_of_adapters_that_are_cast_once_save_28_launches_of_a_layer():
    """Of seven linear layers: a cast to float32 and one back, forward and backward."""
    twice, once = (sum(way.total() for way in per_layer("llama", False, casts)) for casts in (2, 1))
    assert (twice, once) == (226, 198)
