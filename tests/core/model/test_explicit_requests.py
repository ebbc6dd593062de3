"""What was asked for by name runs, or is refused before it trains: never something else without a word."""

import re

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from trl.models import enable_selective_activation_checkpointing

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.reference_flash import flash_attn_varlen_func, reference_flash
from tests.helpers.tiny import make_model
from trl_paddingfree.core import upstream
from trl_paddingfree.core.check.prove import check_flat
from trl_paddingfree.core.model import architecture, kernels
from trl_paddingfree.core.model.routes import choose_route

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
        ("gpt_oss", {}, "sinks"),
    ],
)
def test_varlen_by_name_is_refused_for_what_only_some_layers_ask(model_type, config, reason):
    model = tiny_model(model_type, **config)
    upstream.set_attn_implementation(model, "sdpa")
    assert choose_route(model, **CUDA).backend == "varlen"
    with pytest.raises(ValueError, match=f"attention has {reason}, which the kernel does not"):
        choose_route(model, "varlen", **CUDA)


def test_selective_checkpointing_keeps_the_results_of_varlen():
    """By TRL's own policy, which keeps results of operators with "flash_attn" in their names."""
    model = make_model()
    enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable()
    policy = model.model.layers[0]._gradient_checkpointing_func.keywords["context_fn"].args[0]
    ours, product = torch.ops.trl_paddingfree.flash_attn_on_paths, torch.ops.aten.mm
    assert policy(None, ours.default) == CheckpointPolicy.MUST_SAVE
    assert policy(None, product.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_a_gpu_without_flash_attention_is_told_what_serves_and_what_it_costs(monkeypatch, caplog):
    model, capability = make_model(), (7, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernels.why_no_varlen.cache_clear()
    reason = r"the GPU has compute capability 7.5, the kernel needs 8.0 \(Ampere\) or more"
    assert choose_route(model, **CUDA).backend == "segment"
    assert re.search(rf"trains with segment: .*, because .*: {reason}. Results are exact, but .* slower", caplog.text)
    with pytest.raises(ValueError, match=reason):
        choose_route(model, "varlen", **CUDA)
    capability = (8, 0)
    kernels.why_no_varlen.cache_clear()
    assert choose_route(model, **CUDA).backend == "varlen"
    kernels.why_no_varlen.cache_clear()


def flash_attention_4(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
):
    """With the arguments of its fourth version: sinks have another name, and there is no dropout."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = tuple(-1 if size is None else size for size in window_size)
    rest = {"window_size": window, "softcap": softcap, "s_aux": learnable_sink}
    return flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=softmax_scale, causal=causal, **rest)


@pytest.mark.parametrize("name", ["flash_attention_4", "kernels-community/flash-attn4"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gemma2", "gemma3_text"])
def test_flash_attention_4_serves_by_each_of_its_names(name, model_type):
    with reference_flash(flash_attention_4):
        model = tiny_model(model_type, attn_implementation=name)
        if upstream.attn_implementation(model) != name:
            pytest.skip("transformers takes another kernel")
        route = choose_route(with_head(model))
        assert (route.backend, route.loaded_with, route.prefix_sharing) == ("flash", name, True)
        assert check_flat(model, route).passed
