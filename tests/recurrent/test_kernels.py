"""The functions of transformers by which layers that carry state mix tokens: those that ours stand in for."""

import functools
import inspect
import sys
import types

import pytest
import torch

from tests.helpers.architectures import tiny_model
from trl_paddingfree.recurrent import kernels, tree
from trl_paddingfree.recurrent.layers import state_layers


def test_a_kernel_that_is_there_is_not_missing(monkeypatch):
    """transformers' decorator takes the kernel of a package when a module is imported: here one of our own."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    package = types.ModuleType("causal_conv1d")
    package.causal_conv1d_fn = lambda x, weight, seq_idx=None: x
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    function = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(
        lambda hidden_states, weight: hidden_states
    )
    assert kernels._missing_package("causal_conv1d_fn", function) is None


def test_a_function_that_the_package_kernels_makes_a_module_has_the_same_kernel():
    """It makes layers of functions, which have no `__wrapped__`."""
    from transformers.models.falcon_h1 import modeling_falcon_h1

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return modeling_falcon_h1.mamba2_chunk_scan(*args, **kwargs)

    class Kernel(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return modeling_falcon_h1.mamba2_chunk_scan(*args, **kwargs)

    fallback, of_hub = Func(), Func()  # whose forward it replaces, with its own if the hub has no kernel
    fallback.forward = types.MethodType(Func.forward, fallback)
    of_hub.forward = types.MethodType(Kernel.forward, of_hub)
    functions = modeling_falcon_h1.mamba2_chunk_scan, Func(), fallback, of_hub
    found = [kernels._missing_package("mamba2_chunk_scan", function) for function in functions]
    assert found == ["mamba-ssm", "mamba-ssm", "mamba-ssm", None]


# What stands in for these functions is given, and gives them, these parameters
STATE_FUNCTIONS = {
    "causal_conv1d_fn": {"hidden_states", "weight", "bias", "activation"},
    "chunk_kimi_delta_attention": {"g", "beta", "chunk_size", "initial_state", "output_final_state"},
    "mamba2_chunk_scan": {"dt", "D", "dt_bias", "dt_softplus", "dt_limit", "chunk_size", "initial_states"},
    "mamba_selective_scan": {"dt", "D", "z", "delta_bias", "delta_softplus", "return_last_state"},
    "torch_chunk_gated_delta_rule": {"g", "beta", "chunk_size", "initial_state", "output_final_state"},
    "mamba2_split_conv1d_scan_combined": set(),
    "mamba_inner_fn": set(),
}
# What the layers of each call, beside the convolution
CALLED = {
    "kimi_linear bailing_hybrid": {"chunk_kimi_delta_attention"},
    "qwen3_5_text qwen3_5_moe_text qwen3_next qwen4_exp_text olmo_hybrid": {"torch_chunk_gated_delta_rule"},
    "mamba falcon_mamba": {"mamba_selective_scan", "mamba_inner_fn"},
    "jamba zamba": {"mamba_selective_scan"},
    "mamba2 bamba falcon_h1 granitemoehybrid nemotron_h zamba2": {
        "mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined",
    },
    "lfm2 lfm2_moe lfm3": set(),
}


@pytest.mark.parametrize("model_types", CALLED)
def test_layers_that_carry_state_call_functions_that_ours_stand_in_for(model_types):
    for layer in (layer for name in model_types.split() for layer in state_layers(tiny_model(name))):
        functions = kernels.functions_of(type(layer).forward)
        assert functions.keys() == CALLED[model_types] | {"causal_conv1d_fn"}, layer
        for name, function in functions.items():
            assert STATE_FUNCTIONS[name] <= inspect.signature(function).parameters.keys(), layer


def test_functions_are_replaced_for_one_forward_only():
    """accelerate's decorator holds the forward that it wraps as a variable, where the copy takes its place."""
    (layer,), states = state_layers(tiny_model("lfm2")), torch.randn(1, 4, 32)
    assert hasattr(type(layer).forward, "__wrapped__")
    expected, calls = layer(states), []

    def convolve(states, *args, **kwargs):
        calls.append(states)
        return torch.zeros_like(states)

    assert not tree.with_functions(layer.forward, {"causal_conv1d_fn": convolve})(states).any()
    assert len(calls) == 1
    assert torch.equal(layer(states), expected)
    with pytest.raises(TypeError, match="partial"):
        tree.with_functions(functools.partial(layer.forward), {})
