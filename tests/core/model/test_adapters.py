"""LoRA layers under autocast: their inputs are cast once, and nothing else changes."""

from contextlib import nullcontext

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.helpers.flat_and_padded import flat_model
from tests.helpers.tiny import SEED, lora, make_model
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model.casts import cast_inputs_once

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def adapted(folder=None, once=True, **options):
    """A bfloat16 model, or a 4-bit one from `folder`, with adapters on all linear layers."""
    if folder is None:
        model = make_model(dtype=torch.bfloat16, seed=SEED)
    else:
        make_model(seed=SEED, hidden_size=64, intermediate_size=128).save_pretrained(folder)  # blocks of 64 weights
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantized)
    flat_model(model)
    torch.manual_seed(SEED)
    peft_model = get_peft_model(model, options.get("peft_config") or lora(**options)).train()
    peft_model.enable_input_require_grads()
    if once:
        cast_inputs_once(peft_model, "cpu")
    return peft_model


def arguments(flat):
    rows = torch.randint(1, 69, (3, 20), generator=torch.Generator().manual_seed(SEED))
    rows[1, :9] = rows[0, :9]
    inputs = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
    if flat:
        inputs["flat_batch"] = FlatBatch.from_rows(rows.tolist(), rows.tolist())
    return {**inputs, "fused_lm_head": True, "use_cache": False}


@pytest.fixture
def casts(monkeypatch):
    """The dtypes to which inputs of LoRA layers were cast."""
    done, cast = [], LoraLayer._cast_input_dtype

    def watched(layer, x, dtype):
        result = cast(layer, x, dtype)
        done.extend([result.dtype] if result is not x else [])
        return result

    monkeypatch.setattr(LoraLayer, "_cast_input_dtype", watched)
    return done


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not-reentrant"])
@pytest.mark.parametrize("flat", [False, True], ids=["padded", "flat"])
@pytest.mark.parametrize("in_4_bits", [False, True], ids=["lora", "qlora"])
def test_casting_once_changes_no_bit_of_the_loss_or_of_a_gradient(casts, tmp_path, in_4_bits, flat, checkpointing):
    results, numbers = [], []
    for once in (False, True):
        model = adapted(tmp_path if in_4_bits else None, once)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        casts.clear()
        with torch.autocast(**BF16):
            loss = -model(**arguments(flat)).log_probs.sum()
        loss.backward()
        numbers.append(len(casts))
        results.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    linear_layers = 7 * 2
    assert numbers == [linear_layers * (1 if checkpointing is None else 2), 0]


def test_without_autocast_inputs_are_cast_as_before(casts):
    """Weights in bfloat16 make inputs that float32 adapters cannot be multiplied with."""
    outputs = []
    for once in (False, True):
        model = adapted(once=once)
        with torch.autocast(**BF16):
            model(**arguments(False))
        casts.clear()
        outputs.append(model(input_ids=torch.tensor([[5, 6, 7]])).logits)
        assert casts == [torch.float32] * 14
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, False),
        ({"peft_config": AdaLoraConfig(total_step=9, tfinal=1, target_modules="all-linear")}, False),
        ({"use_dora": True}, True),  # it computes norms of weights in the dtype of the input
        ({"lora_dropout": 0.1}, True),  # on a CPU, its scale is rounded to the dtype of the input
    ],
    ids=["lora", "adalora", "dora", "dropout"],
)
def test_layers_whose_results_would_change_keep_their_casts(casts, options, keeps):
    with torch.autocast(**BF16):
        adapted(**options)(**arguments(False))
    assert bool(casts) == keeps


def test_adapters_in_bfloat16_keep_their_casts():
    """Under float16 autocast, an input that were not cast to bfloat16 first would be another number."""
    model = get_peft_model(make_model(dtype=torch.bfloat16), LoraConfig(), autocast_adapter_dtype=False)
    cast_inputs_once(model, "cpu")
    assert {layer.cast_input_dtype_enabled for layer in model.modules() if isinstance(layer, LoraLayer)} == {True}


def test_layers_compile_with_and_without_autocast():
    layer = adapted().base_model.model.model.layers[0].self_attn.q_proj
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(3, 32).bfloat16()
    for context in (torch.autocast(**BF16), nullcontext()):
        with context:
            assert torch.equal(compiled(x), layer(x))


def test_layers_with_several_active_adapters_keep_their_casts(casts):
    """The one cast of their input adds up the gradients of all adapters in float32."""
    model = adapted(once=False)
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    model.base_model.set_adapter(["default", "other"])
    cast_inputs_once(model, "cpu")
    with torch.autocast(**BF16):
        model(**arguments(False))
    assert casts
