"""A call without a flat batch after `install` equals the one before, bit for bit, on every architecture."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from transformers.utils.generic import is_flash_attention_requested

from tests.helpers.architectures import MODEL_TYPES, NOT_BUILT, tiny_model, with_head
from tests.helpers.flat_and_padded import install
from tests.helpers.reference_flash import reference_flash
from tests.helpers.tiny import SEED
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route, routes_to_try
from trl_paddingfree.core.model.told import StandIn, register_attention

# Models whose files compare `config._attn_implementation` with a name
BY_NAME = ("axk2", "deepseek_v32", "dots3_note_text", "falcon", "glm_moe_dsa", "gpt2", "hy_v4", "minimax_m3_vl_text")
GENERATED = (*BY_NAME, "gemma3_text", "gemma4_text", "gpt_neo", "llama", "llama4_text", "mpt", "opt", "whisper")
LENGTH = 21  # longer than the windows, chunks and index blocks of the tiny models


def make(model_type, attention=None, **options):
    return with_head(tiny_model(model_type, attn_implementation=attention, seed=SEED, **options))


def answered(call):
    """What a call gives, or the error that it raises: that stays the same, too."""
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def forward(model):
    """Loss, logits and attentions, with padding on the right of one row and on the left of another."""
    input_ids = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(input_ids)
    mask[0, -5:], mask[1, :5] = 0, 0
    eager = {"output_attentions": True} if model.config.get_text_config()._attn_implementation == "eager" else {}

    def call():
        output = model(input_ids=input_ids, attention_mask=mask, labels=input_ids, use_cache=False, **eager)
        return [output.loss, output.logits, *(x for x in output.get("attentions") or () if x is not None)]

    return answered(call)


def generated(model):
    """Scores of the tokens that follow rows padded on the left, with a cache and without."""
    input_ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(input_ids)
    mask[0, :5] = 0
    options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    lengths = {"min_new_tokens": 3, "max_new_tokens": 3}
    found = []
    for use_cache in (True, False):
        call = lambda: model.generate(input_ids, attention_mask=mask, use_cache=use_cache, **lengths, **options)  # noqa: B023, E731
        found += answered(lambda: call().scores)  # noqa: B023
    return found


def assert_unchanged(model, ask):
    before = ask(model)
    assert before
    for route in routes_to_try(model, choose_route(model, prefix_sharing=False)):
        FlatModel.install(model, route)
        for old, new in zip(before, ask(model), strict=True):
            same = torch.equal(old.nan_to_num(), new.nan_to_num()) if isinstance(old, torch.Tensor) else old == new
            assert same, route


@pytest.mark.drawn(70)
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NOT_BUILT])
def test_plain_call_after_install_equals_the_one_before(model_type):
    assert_unchanged(make(model_type), forward)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        *((name, "eager") for name in (*BY_NAME, "gemma3_text", "llama")),
        *((name, "flash_attention_2") for name in ("falcon", "gemma3_text", "llama")),
    ],
)
def test_plain_call_of_another_attention_equals_the_one_before(model_type, attention):
    with reference_flash() if attention != "eager" else nullcontext():
        assert_unchanged(make(model_type, attention), forward)


@pytest.mark.parametrize("model_type", GENERATED)
def test_generation_after_install_equals_the_one_before(model_type):
    assert_unchanged(make(model_type), generated)


def test_gpt2_that_upcasts_by_name_stays_as_it_was():
    """GPT-2 computes attention by itself if it is called "eager"; such a model gets a mask."""
    model = make("gpt2", "eager", reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    assert_unchanged(model, forward)


def test_a_stand_in_reads_as_the_name_that_it_stands_for_and_is_found_as_its_own():
    name = register_attention("flash_attention_2", "flash")
    assert name == "flash_attention_2"
    assert "flash_attention_2" == name  # noqa: SIM300 modeling files write it both ways
    assert not name != "flash_attention_2"  # noqa: SIM202
    assert name in ("eager", "flash_attention_2")
    assert name != "sdpa"
    assert name != StandIn("flash_attention_2", "segment")
    assert is_flash_attention_requested(requested_attention_implementation=name)
    assert f"{name}" == "flash_attention_2"
    assert {"flash_attention_2": 1, name: 2}[name] == 2
    for copied in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert type(copied) is StandIn
        assert {name: 2}[copied] == 2


@pytest.mark.slow
def test_a_compiled_model_takes_the_stand_in():
    model = make("llama", num_hidden_layers=1)
    before = forward(model)
    install(model)
    torch.compiler.reset()  # what tests before have compiled counts towards the limit of recompilations
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    for old, new in zip(before, forward(compiled), strict=True):
        assert torch.equal(old, new)
    assert not [reason for reason in torch._dynamo.utils.counters["graph_break"] if "Observed exception" in reason]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
