"""What only a GPU can show: the varlen kernel against float32, the host's waiting, and determinism."""

import copy
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, and is deterministic only with it

import pytest
import torch

from scripts.benchmark.baseline import baseline_attention
from scripts.benchmark.measure import count_syncs
from tests.helpers.architectures import with_head
from tests.helpers.flat_and_padded import install, log_probs_and_gradients, padded_rows
from tests.helpers.tiny import SHARING, make_model, preference_data
from tests.runs import run
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model import kernels
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.model.told import FlatMask
from trl_paddingfree.recurrent.layers import missing_kernels, state_layers

pytestmark = pytest.mark.gpu

SEEDS = [11, 29]
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}
MODELS = {
    "grouped": ("llama", {}),
    "window": ("mistral", {"sliding_window": 12}),
    "full heads": ("llama", {"num_key_value_heads": 4}),
    # Heads as large as the kernels' smallest tiles
    "gated delta net": (
        "qwen3_5_text",
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
        },
    ),
    "mamba 2": ("falcon_h1", {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64}),
}
# The kernel's error may be twice that of the ordinary low-precision run, and one rounding of the largest number
EPS = torch.finfo(torch.bfloat16).eps


def make_batch(seed, prefix_sharing=True):
    """Pairs that share prompts, of which two pairs have the same one: padded inputs, and the flat batch."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(1, 256, (n,), generator=generator).tolist()

    prompts = [tokens(40), tokens(9), tokens(70)]
    rows = [prompts[i] + tokens(n) for i, n in ((0, 33), (1, 5), (2, 90), (0, 7), (0, 20), (1, 61), (2, 1), (0, 50))]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in rows]
    inputs = {name: x.cuda() for name, x in padded_rows(rows, labels).items()}
    return inputs, FlatBatch.from_rows(rows, labels, prefix_sharing=prefix_sharing).to("cuda")


def make_models(model_type="llama", **overrides):
    """The same weights: in float32, in bfloat16 with padding, in bfloat16 flat."""
    reference = make_model(model_type, **{**SIZES, **overrides}).cuda()
    padded = copy.deepcopy(reference).bfloat16()
    flat = copy.deepcopy(padded)
    for model in (reference, padded, flat):
        with_head(model)
    install(flat)
    return reference, padded, flat


def budget(padded, reference):
    return 2 * ((padded - reference).abs().max() + EPS * reference.abs().max())


def test_the_gpu_is_used_by_its_own_kernel():
    assert choose_route(make_models()[2]).backend == "varlen"


@SHARING
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_as_close_to_float32_as_padded_bfloat16(name, prefix_sharing):
    """Log-probabilities and gradients of bfloat16: flat is as near to float32 as padded, within the budget."""
    model_type, overrides = MODELS[name]
    for seed in SEEDS:
        models = make_models(model_type, **overrides)
        if missing := missing_kernels(models[2]):
            pytest.skip(f"without {', '.join(missing)}")
        assert all(layer.flat_state.along_tree and layer.flat_state.kernels for layer in state_layers(models[2]))
        inputs, batch = make_batch(seed, prefix_sharing)
        found = [
            log_probs_and_gradients(model, **inputs, **flat)
            for model, flat in zip(models, ({}, {}, {"flat_batch": batch}), strict=True)
        ]
        reference, padded, ours = ({"log_probs": log_probs, **gradients} for log_probs, gradients in found)
        for figure, expected in reference.items():
            assert (ours[figure].float() - expected).abs().max() <= budget(padded[figure].float(), expected), figure


def backbone(model, batch):
    """Hidden states of the flat tokens."""
    return model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=FlatMask.carrying(batch.layout),
        use_cache=False,
    ).last_hidden_state


@pytest.fixture
def sync_is_an_error():
    """A function that makes every operation raise that makes the host wait."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@SHARING
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_host_never_waits_inside_the_flat_model(sync_is_an_error, prefix_sharing, checkpointing):
    model, batch = make_models()[2], make_batch(SEEDS[0], prefix_sharing)[1]
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    backbone(model, batch).sum().backward()  # kernels are loaded, memory is allocated
    torch.cuda.synchronize()
    sync_is_an_error()
    backbone(model, batch).sum().backward()


def test_the_host_waits_in_the_head_as_often_as_in_trls():
    _, padded, flat = make_models()
    inputs, batch = make_batch(SEEDS[0])
    counts = []
    for model, arguments in ((padded, inputs), (flat, {**inputs, "flat_batch": batch})):
        arguments = {**arguments, "fused_lm_head": True, "use_cache": False}
        model(**arguments)
        # The padded model's own layers wait for its mask: only what comes after them is compared
        quiet = model.base_model.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"))
        loud = model.base_model.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("warn"))
        with count_syncs() as count:
            model(**arguments)
        counts.append(count())
        quiet.remove()
        loud.remove()
    assert counts[0] > 0, "the count counts nothing"
    assert counts[1] <= counts[0]


def test_sync_counting_counts():
    x = torch.arange(4, device="cuda")
    with count_syncs() as count:
        x.sum()
        x.sum().item()
        x[x > 1].sum()
    assert count() == 2


@SHARING
def test_gradients_are_the_same_bit_for_bit_where_determinism_is_asked_for(prefix_sharing):
    model, batch = make_models()[2], make_batch(SEEDS[0], prefix_sharing)[1]
    weights = torch.randn(batch.input_ids.size(1), SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)

    def gradients():
        model.zero_grad()
        (backbone(model, batch) * weights).sum().backward()
        return [p.grad.clone() for p in model.base_model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_baseline_of_the_benchmark_computes_what_padded_sdpa_computes(seed):
    reference, padded, _ = make_models()
    inputs, _ = make_batch(seed)
    unpadded = copy.deepcopy(padded)
    unpadded.config._attn_implementation = baseline_attention("cuda", torch.bfloat16)
    with torch.no_grad():
        expected, low, actual = (
            model(**inputs, fused_lm_head=True, use_cache=False).log_probs.float()
            for model in (reference, padded, unpadded)
        )
    assert (actual - expected).abs().max() <= budget(low, expected)


def test_dpo_follows_padded_trl_in_bfloat16(tokenizer, monkeypatch):
    calls, kernel = [], kernels.torch_varlen()
    monkeypatch.setattr(kernels, "torch_varlen", lambda: lambda *args: calls.append(len(args)) or kernel(*args))
    model = make_model(**{**SIZES, "vocab_size": len(tokenizer)})
    options = {"bf16": True, "use_cpu": False, "learning_rate": 1e-4}

    options |= {"adam_epsilon": 1e-5, "train_dataset": preference_data(16, SEEDS[0]), "processing_class": tokenizer}
    padded, ours = (
        run("dpo", layout, model=copy.deepcopy(model), ref_model=copy.deepcopy(model), **options)
        for layout in ("padded", "shared")
    )
    assert ours.trainer.runtime.route.backend == "varlen"
    assert calls, "the kernel was chosen and never called"
    for expected, actual in zip(padded.log_history[:-1], ours.log_history[:-1], strict=True):
        for name in ("loss", "logps/chosen", "logps/rejected"):
            # Sums of up to a hundred log-probabilities, each off by a rounding or two
            assert abs(actual[name] - expected[name]) <= 8 * EPS * max(1, abs(expected[name])), name
