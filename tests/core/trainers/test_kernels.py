"""Training by the kernels of a GPU, in bfloat16: these are plain PyTorch here, and what is around them is its own."""

import sys
from functools import cache
from unittest import mock

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import GenerationMixin

from tests.helpers.launching import finished
from tests.helpers.reference_flash import half_flash_func, reference_flash, varlen_on
from tests.helpers.tiny import SEED, arguments, make_model, preference_data, prompts, unpaired
from tests.runs import LAYOUTS, assert_as_close, run
from trl_paddingfree.core.trainers import starting

DATA = {
    "dpo": preference_data,
    "sft": lambda n, seed: unpaired(n, seed).remove_columns("label"),
    "kto": unpaired,
    "grpo": prompts,
}
# A layer that sees all tokens before it, and one with a window; heads of 8 in two groups
SIZES = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}


def generate(model, input_ids, **kwargs):
    """Completions that do not depend on how the model rounds."""
    draws = torch.Generator().manual_seed(int(input_ids.sum()))
    return torch.cat([input_ids, torch.randint(9, 69, (len(input_ids), 8), generator=draws).to(input_ids.device)], 1)


def train(task, layout, attention="sdpa", **options):
    def make():
        return make_model("qwen2", attn_implementation=attention, **SIZES)

    given = {**arguments(task, False, make(), make=lambda seed: make()), "train_dataset": DATA[task](12, SEED)}
    with mock.patch.object(GenerationMixin, "generate", generate):
        return run(task, layout, **given, steps=2, **options)


@cache
def padded(task):
    """Padded TRL in float32, and in bfloat16."""
    return train(task, "padded", bf16=False), train(task, "padded", bf16=True)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("task", DATA)
def test_bfloat16_is_as_close_to_float32_by_the_kernels_as_with_padding(task, backend, layout):
    expected, options = padded(task), {"bf16": True, "gradient_checkpointing": layout == "shared"}
    if backend == "varlen":
        with varlen_on() as calls:
            ours = train(task, layout, **options)
        assert {call.arguments["window_size"] for call in calls} == {(-1, 0), (7, 0)}
        shared = {len(call.arguments["key"]) > len(call.arguments["query"]) for call in calls}
        assert (True in shared) == (layout == "shared")
    else:
        with reference_flash(half_flash_func):
            ours = train(task, layout, "flash_attention_2", **options)
    route = ours.trainer.runtime.route
    assert (route.backend, route.prefix_sharing) == (backend, layout == "shared")
    assert_as_close(*expected, ours)


def test_adapters_cast_their_inputs_once_and_train_the_same_bit_for_bit(monkeypatch):
    def with_adapters(**options):
        given = arguments("dpo", model=make_model(dtype=torch.bfloat16))
        options = {"steps": 2, "bf16": True, "gradient_checkpointing": True, **options}
        result = run("dpo", "ours", **given, **options)
        with torch.autocast("cpu", torch.bfloat16):
            layers = [module for module in result.trainer.model.modules() if isinstance(module, LoraLayer)]
            return result, {bool(layer.cast_input_dtype_enabled) for layer in layers}

    once, casts = with_adapters()
    assert casts == {False}
    assert with_adapters(padding_free=False, steps=1)[1] == {True}
    monkeypatch.setattr(starting, "cast_inputs_once", lambda *args: None)
    twice, _ = with_adapters()
    assert once.losses == twice.losses
    assert all(torch.equal(weight, twice.weights[name]) for name, weight in once.weights.items())


# What runs in a process of its own, because Triton decides at its import whether it is interpreted
TRITON_HEAD = """
from unittest import mock

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils

from tests.helpers.tiny import make_model
from trl_paddingfree.core.check.probe import row_inputs
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route

model = make_model()
utils.add_fused_lm_head(model)
FlatModel.install(model, choose_route(model))
rows = [row.numpy() for row in torch.arange(5, 29).split([11, 3, 10])]
rows[2][:6] = rows[0][:6]


def answers(**flat):
    model.zero_grad()
    output = model(**row_inputs(model, rows, **flat))
    output.log_probs.square().sum().backward()
    return output.log_probs.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def never(*args, **kwargs):
    raise AssertionError("the head was computed without Triton")


expected = answers()
names = {"_use_triton": lambda device: True, "_forward_tile": never, "_backward_tile": never}
with mock.patch.multiple(chunked_logprob, **names), mock.patch.object(utils, "_use_triton", names["_use_triton"]):
    for flat in ({}, {"prefix_sharing": False}, {"prefix_sharing": True}):
        log_probs, gradients = answers(**flat)
        torch.testing.assert_close(log_probs, expected[0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[1][name], atol=1e-4, rtol=1e-4)
"""


def test_trls_triton_head_computes_flat_rows_as_padded_ones():
    """The kernels that run on GPUs, interpreted; plain PyTorch stands in for them on CPUs everywhere else."""
    pytest.importorskip("triton")
    finished([sys.executable, "-W", "ignore", "-c", TRITON_HEAD], 300, TRITON_INTERPRET="1")
