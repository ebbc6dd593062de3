"""What was asked for by name runs, or is refused before it trains: never something else without a word."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from trl.models import enable_selective_activation_checkpointing

from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model
from trl_paddingfree import upstream
from trl_paddingfree.model import architecture
from trl_paddingfree.model.routes import choose_route

CUDA = {"dtype": torch.bfloat16, "device": torch.device("cuda")}


@pytest.mark.parametrize(
    ("model_type", "config", "dropout"),
    [
        ("llama", {"attention_dropout": 0.1}, 0.1),
        ("gpt2", {"attn_pdrop": 0.2}, 0.2),
        ("opt", {"attention_dropout": 0.3}, 0.3),
        ("gpt2", {"resid_pdrop": 0.2}, 0.0),
    ],
)
def test_attention_dropout_speaks_against_varlen(model_type, config, dropout):
    """In training it would run per segment, which a check without dropout does not try."""
    model = tiny_model(model_type, attn_implementation="sdpa", **config)
    assert architecture.attention_dropout(model) == dropout
    if not dropout:
        assert choose_route(model, "varlen", **CUDA).backend == "varlen"
        return
    assert choose_route(model, **CUDA).backend == "segment"
    with pytest.raises(ValueError, match=f"attention has a dropout of {dropout}.*set it to 0"):
        choose_route(model, "varlen", **CUDA)


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("gemma2", {}, "soft-capping"),
        ("llama", {"head_dim": 12}, "a head size of 12"),
        ("llama", {"head_dim": 264}, "a head size of 264"),
    ],
)
def test_varlen_by_name_is_refused_for_what_only_some_layers_ask(model_type, config, reason):
    model = tiny_model(model_type, **config)
    upstream.set_attn_implementation(model, "sdpa")
    assert choose_route(model, **CUDA).backend == "varlen"
    with pytest.raises(ValueError, match=f"attention has {reason}, and the kernel has not"):
        choose_route(model, "varlen", **CUDA)


def test_attention_with_sinks_is_beyond_varlen():
    assert architecture.beyond_varlen(tiny_model("gpt_oss", attn_implementation="eager")) == ["sinks"]
    assert architecture.beyond_varlen(make_model()) == []


def test_selective_checkpointing_keeps_the_results_of_varlen():
    from torch.nn.attention import varlen  # noqa: F401 (registers the operator)

    assert str(torch.ops.torch_attn._varlen_attn.default) == "torch_attn._varlen_attn.default"
    for keeps in (False, True):
        model = make_model()
        enable_selective_activation_checkpointing(model)
        if keeps:
            upstream.keep_varlen_results(model)
            upstream.keep_varlen_results(model)  # once is enough
        model.gradient_checkpointing_enable()
        contexts = model.model.layers[0]._gradient_checkpointing_func.keywords["context_fn"]
        policy = contexts.args[0]
        ops = torch.ops.torch_attn._varlen_attn, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        assert [policy(None, op.default) == CheckpointPolicy.MUST_SAVE for op in ops] == [keeps, True]
        assert policy(None, torch.ops.aten.mm.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_without_selective_checkpointing_nothing_changes():
    model = make_model()
    before = model.gradient_checkpointing_enable
    upstream.keep_varlen_results(model)
    assert model.gradient_checkpointing_enable == before
