"""Every attention backend against attention under the dense mask, forward and backward."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from tests.helpers.reference_flash import (
    flash_attn_varlen_func,
    half_flash_func,
    reference_flash,
    torch_varlen_func,
    varlen_on,
)
from tests.helpers.tiny import SEED, SHARING
from trl_paddingfree.core.flat.layout import FlatLayout, Gather
from trl_paddingfree.core.flat.segments import Segments, share_prefixes
from trl_paddingfree.core.model.backends import ATTENTION
from trl_paddingfree.core.model.kernels import takes_varlen, torch_varlen
from trl_paddingfree.core.model.told import FlatMask, register_attention

# float64 against float32 scores of the stand-in kernel: rounding of sums over at most 30 keys of order one
FLOAT32 = 2e-6
FLOAT64 = 1e-12


class Attention(torch.nn.Module):
    """What attention functions read of the layer that calls them."""

    is_causal = True
    training = False
    layer_idx = 0

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups
        self.head_dim = 8
        self.scaling = 8**-0.5
        self.config = SimpleNamespace(_attn_implementation="sdpa")


class SoftcapAttention(Attention):
    """A layer whose file has an eager function with soft-capping."""


class SinkAttention(Attention):
    """A layer whose file has an eager function with sinks."""

    def __init__(self, groups):
        super().__init__(groups)
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64))


SoftcapAttention.__module__ = modeling_gemma2.__name__
SinkAttention.__module__ = modeling_gpt_oss.__name__


def random_segments(seed):
    """A tree of rows of two tokens' alphabet: prefixes within prefixes, rows that are prefixes of others."""
    rng = np.random.default_rng(seed)
    return share_prefixes([rng.integers(0, 2, rng.integers(1, 14)) for _ in range(6)])[0]


SEGMENTS = {
    "flat": Segments.from_lengths([7, 1, 12, 3]),
    "one branch": Segments((6, 3), (-1, 0), (0, 2)),
    "equal pairs": Segments((6,) * 3 + (3,) * 3, (-1,) * 3 + (0, 1, 2), (0,) * 3 + (2,) * 3),
    # Roots and branches of about one shape, which are computed together
    "short": Segments((20, 19) * 3 + (4,) * 6, (-1,) * 6 + tuple(range(6)), (0,) * 6 + (18, 17) * 3),
    # Branches of one length, which leave the row that they share earlier and earlier: keys are padded, queries are not
    "earlier": Segments((60,) + (4,) * 8, (-1,) + (0,) * 8, (0, *range(60, 52, -1))),
    "nested": Segments((5, 4, 2, 9), (-1, 0, 1, -1), (0, 3, 6, 0)),
    f"random{SEED}": random_segments(SEED),
}
FEATURES = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "window": {"kv_heads": 2, "window": 3},
    "narrow value": {"value_dim": 4},
    "scale": {"scaling": 0.9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "kv_heads": 1},
}


def oracle(query, key, value, segments, window=None, softcap=None, sinks=None, scaling=8**-0.5):
    """`(1, T, H, D)` attention under the mask that follows from the definition of a path."""
    allowed = torch.from_numpy(segments.dense_mask())
    if window is not None:
        positions = torch.from_numpy(segments.position_ids)
        allowed = allowed & (positions[None] > positions[:, None] - window)
    group = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, scores.size(2), 1)], -1)
    return (scores.softmax(-1)[..., : key.size(2)] @ value).transpose(1, 2)


def states(segments, kv_heads=4, value_dim=8, dtype=torch.float64, device="cpu"):
    torch.manual_seed(SEED)
    shapes = [(1, 4, segments.num_tokens, 8), (1, kv_heads, segments.num_tokens, 8)]
    shapes.append((1, kv_heads, segments.num_tokens, value_dim))
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def compare(backend, previous, module, inputs, segments, tolerance, kwargs, expected_kwargs):
    """Output and the gradient of every input."""
    layout = FlatLayout.from_segments(segments).to(inputs[0].device)
    parameters = [*inputs, *module.parameters()]
    output, _ = ATTENTION[backend](layout, previous, module, *inputs, **kwargs)
    expected = oracle(*inputs, segments, **expected_kwargs)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype, device=expected.device).view_as(expected)
    gradients = [torch.autograd.grad((x * weights).sum(), parameters, retain_graph=True) for x in (output, expected)]
    for ours, theirs in zip((output, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert float((ours - theirs).abs().max()) < tolerance * max(1.0, float(theirs.abs().max())), segments


def feature_arguments(feature, previous):
    """The layer, the arguments that its model gives attention, and what the oracle makes of them."""
    options = dict(FEATURES[feature])
    shape = {name: options.pop(name) for name in ("kv_heads", "value_dim") if name in options}
    groups = 4 // shape.get("kv_heads", 4)
    layer = {"softcap": SoftcapAttention, "sinks": SinkAttention}.get(feature, Attention)
    if previous == "eager" and layer is Attention:
        layer = SoftcapAttention  # any file with an ordinary eager function
    module = layer(groups)
    kwargs = {"scaling": options.get("scaling", module.scaling)}
    if "window" in options:
        kwargs["sliding_window"] = options["window"]
    if "softcap" in options:
        kwargs["softcap"] = options["softcap"]
    if options.pop("sinks", False):
        options["sinks"] = module.sinks
        if previous != "eager":  # eager functions read them from the layer
            kwargs["s_aux"] = module.sinks
    return shape, module, kwargs, options


KINDS = ("sdpa", "eager", "flash_attention_2")


@pytest.mark.parametrize(
    ("previous", "feature"),
    # models with soft-capping or sinks have no SDPA
    [(p, f) for p in KINDS for f in FEATURES if p != "sdpa" or f not in ("softcap", "sinks")],
)
def test_backends_equal_the_dense_mask(previous, feature):
    shape, module, kwargs, options = feature_arguments(feature, previous)
    tolerance = FLOAT64 if previous == "sdpa" else FLOAT32  # eager functions and the stand-in take softmax in float32
    backend = "flash" if previous == "flash_attention_2" else "segment"
    with reference_flash():
        for segments in SEGMENTS.values():
            compare(backend, previous, module, states(segments, **shape), segments, tolerance, {**kwargs}, options)


@pytest.mark.parametrize("name", SEGMENTS)
def test_functions_of_ones_own_may_place_queries_by_lengths(monkeypatch, name):
    def by_lengths(module, query, key, value, attention_mask, scaling):
        seen = causal_lower_right(query.size(2), key.size(2))
        return functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling).transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", by_lengths)
    segments, kwargs = SEGMENTS[name], {"scaling": 0.3}
    compare("segment", "sdpa", Attention(1), states(segments), segments, FLOAT64, kwargs, kwargs)


@pytest.mark.parametrize("feature", ["plain", "grouped", "window", "narrow value", "scale"])
@pytest.mark.parametrize("backend", ["varlen", "flash"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_kernels_equal_the_dense_mask(segments, device, backend, feature):
    """
    PyTorch's kernel, called by us, and called by transformers in the place of flash-attn's; stand-ins on a CPU. Output
    and gradients, with twice the error of plain bfloat16 arithmetic.
    """
    shape, module, kwargs, options = feature_arguments(feature, "sdpa")
    inputs = states(segments, **shape, dtype=torch.bfloat16, device=device)
    high = [x.detach().double().requires_grad_() for x in inputs]
    expected, low = oracle(*high, segments, **options), oracle(*inputs, segments, **options)
    weights = torch.rand_like(expected)
    kernel = half_flash_func if device == "cpu" else torch_varlen_func
    with reference_flash(kernel) if backend == "flash" else varlen_on(device):
        layout = FlatLayout.from_segments(segments).to(device)
        previous = "flash_attention_2" if backend == "flash" else "sdpa"
        output, _ = ATTENTION[backend](layout, previous, module.to(device), *inputs, **kwargs)
        gradients = [
            torch.autograd.grad((x * weights).sum(), y, retain_graph=True)
            for x, y in ((output, inputs), (expected, high), (low, inputs))
        ]
    for ours, exact, rough in zip(
        (output, *gradients[0]), (expected, *gradients[1]), (low, *gradients[2]), strict=True
    ):
        # The kernel may err twice as much as plain bfloat16 arithmetic does
        budget = 2 * ((rough - exact).abs().max() + torch.finfo(torch.bfloat16).eps * exact.abs().max())
        assert (ours - exact).abs().max() <= budget, segments


# Which of queries, keys, values, boundaries and longest segment are changed, how, and what is said of it
REFUSED = {
    "float32": ("qkv", torch.Tensor.float, "no torch.float32"),
    "dtypes": ("k", torch.Tensor.half, "differ in dtype"),
    "head of 12": ("qkv", lambda x: x.repeat(1, 1, 2)[..., :12], "heads of 12"),
    "head of 264": ("qkv", lambda x: x.repeat(1, 1, 33), "heads of 264"),
    "three heads": ("kv", lambda x: x[:, [0, 0, 0]], "heads"),
    "strided": ("q", lambda x: x.mT.contiguous().mT, "not contiguous"),
    "int64": ("b", torch.Tensor.long, "not int32"),
    "meta": ("b", lambda x: x.to("meta"), "on meta"),
    "a tensor": ("n", torch.tensor, "would wait"),
    "too short": ("n", lambda n: n - 1, "longest segment"),
    "empty": ("b", lambda x: torch.cat([x, x[-1:]]), "empty segments"),
    "keys beyond": ("kv", lambda x: torch.cat([x, x]), "beyond the last boundary"),
}


@pytest.mark.parametrize(("names", "change", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_stand_ins_refuse_what_kernels_refuse(backend, names, change, message):
    states = [torch.randn(9, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    call = dict(zip("qkvbn", (*states, torch.tensor([0, 4, 9], dtype=torch.int32), 5), strict=True))
    refused = pytest.raises((AssertionError, ValueError), match=message)
    for changed, outcome in (("", nullcontext()), (names, refused)):
        q, k, v, boundaries, longest = (change(x) if name in changed else x for name, x in call.items())
        with outcome, varlen_on():
            if backend == "varlen":
                torch_varlen()(q, k, v, boundaries, boundaries, longest, longest, None, None)
            else:
                lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
                half_flash_func(q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, **lengths, causal=True)


def test_flash_backend_gives_lengths_as_ints_and_closes_the_boundaries():
    seen = []

    @functools.wraps(flash_attn_varlen_func)  # transformers looks at the kernel's signature
    def kernel(*args, **kwargs):
        seen.append(kwargs)
        return flash_attn_varlen_func(*args, **kwargs)

    segments = SEGMENTS["nested"]
    with reference_flash(kernel):
        module = Attention(1)
        ATTENTION["flash"](FlatLayout.from_segments(segments), "flash_attention_2", module, *states(segments))
    (call,) = seen
    assert (type(call["max_seqlen_q"]), call["max_seqlen_q"]) == (int, 9)  # a tensor costs a device sync per layer
    assert (type(call["max_seqlen_k"]), call["max_seqlen_k"]) == (int, 9)
    assert call["cu_seqlens_q"].tolist() == [0, 5, 9, 11, 20]
    assert call["cu_seqlens_k"].tolist() == [0, 5, 12, 20, 29]


def test_layout_in_chunks_equals_the_dense_mask_cut_into_chunks():
    for seed in range(SEED, SEED + 50):
        segments = random_segments(seed)
        size = 1 + seed % 5
        positions = segments.position_ids // size
        expected = segments.dense_mask() & (positions[:, None] == positions[None])
        assert (FlatLayout.from_segments(segments).chunked(size).segments.dense_mask() == expected).all(), seed


def test_gradients_of_shared_keys_add_up_in_float32():
    """1,000 copies of one key, each with a gradient of 1: bfloat16 would stop counting at 256."""
    copies = 1000
    segments = Segments((2, *[1] * copies), (-1, *[0] * copies), (0, *[1] * copies))
    layout = FlatLayout.from_segments(segments)
    key = torch.ones(segments.num_tokens, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    Gather.apply(key, layout.kv_gather).sum().backward()
    assert key.grad[0].item() == torch.tensor(copies + 1).bfloat16().item()


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({}, {"dtype": torch.float32}),
        ({}, {"size": 12}),
        ({}, {"size": 264}),
        ({"softcap": 1.0}, {}),
        ({"s_aux": torch.zeros(4)}, {}),
        ({"position_bias": torch.zeros(4)}, {}),
        ({"dropout": 0.1}, {}),
    ],
    ids=lambda x: "-".join(map(str, x)),
)
def test_varlen_takes_no_call_that_its_kernel_cannot_compute(kwargs, options):
    query = torch.zeros(1, 4, 3, options.get("size", 8), dtype=options.get("dtype", torch.bfloat16))
    plain = torch.zeros(1, 4, 3, 256, dtype=torch.bfloat16)
    assert not takes_varlen(plain, {})  # on the CPU
    with varlen_on():
        assert takes_varlen(plain, {"softcap": None, "dropout": 0.0})
        assert not takes_varlen(query, kwargs)


@SHARING
def test_under_autocast_float32_states_are_no_reason_against_varlen(prefix_sharing):
    """Rotary embeddings of float32 weights make float32 queries and keys, which autocast hands to SDPA in bfloat16."""
    segments = SEGMENTS["nested" if prefix_sharing else "flat"]
    query, key, value = states(segments, dtype=torch.float32)
    layout, low = FlatLayout.from_segments(segments), value.detach().bfloat16().requires_grad_()
    with varlen_on() as calls:
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = ATTENTION["varlen"](layout, "sdpa", Attention(1), query, key, low, scaling=8**-0.5)
        output.sum().backward()
    assert [calls[0].arguments[name].dtype for name in ("query", "key", "value")] == [torch.bfloat16] * 3
    expected = oracle(*(x.detach().bfloat16().float() for x in (query, key, value)), segments)
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()
    assert all(x.grad.dtype == x.dtype and x.grad.isfinite().all() for x in (query, key, low))


@pytest.mark.parametrize("name", SEGMENTS)
def test_varlen_keeps_keys_once_and_computes_what_copies_do(name):
    segments, window = SEGMENTS[name], 3
    layout, inputs = FlatLayout.from_segments(segments), states(segments, 2, dtype=torch.bfloat16)
    kept = []
    with varlen_on(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output, _ = ATTENTION["varlen"](layout, "sdpa", Attention(2), *inputs, scaling=0.4, sliding_window=window)
        assert {x.data_ptr() for x in inputs} <= {x.data_ptr() for x in kept}
        output_and_lse = 2 * output.numel() + 4 * segments.num_tokens * 4
        assert sum(x.nbytes for x in kept) == sum(x.nbytes for x in inputs) + output_and_lse
        query, *copies = (x.transpose(1, 2)[0] for x in inputs)
        if layout.kv_gather is not None:
            copies = [Gather.apply(x, layout.kv_gather) for x in copies]
        lengths = layout.cu_seqlens_q, layout.cu_seqlens_k, segments.max_seqlen_q, segments.max_seqlen_k
        expected, _ = torch_varlen()(query, *copies, *lengths, 0.4, window)
        weights = torch.randn_like(expected)
        ours, theirs = (torch.autograd.grad(x, inputs, weights) for x in (output[0], expected))
    assert torch.equal(output[0], expected)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", ["flat", "nested"])
def test_varlen_never_takes_cudnn_whatever_that_can_compute(monkeypatch, name):
    """It plans anew for each number of tokens and of segments, keeps all plans, and adds gradients up in any order."""
    monkeypatch.setattr(varlen, "_cudnn_rejection_reasons", lambda *args: [], raising=False)  # PyTorch's, since 2.15
    layout, before = FlatLayout.from_segments(SEGMENTS[name]), torch.backends.cuda.cudnn_sdp_enabled()
    with varlen_on() as calls:
        ATTENTION["varlen"](layout, "sdpa", Attention(1), *states(SEGMENTS[name], dtype=torch.bfloat16))
    assert len(calls) == 1
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_calls_without_a_layout_go_to_the_previous_implementation():
    name = register_attention("sdpa", "segment")
    inputs = [x.detach() for x in states(SEGMENTS["flat"])]
    ours = AttentionInterface()[name](Attention(1), *inputs, None, scaling=0.3)[0]
    assert torch.equal(ours, AttentionInterface()["sdpa"](Attention(1), *inputs, None, scaling=0.3)[0])
    assert AttentionMaskInterface()[name] is AttentionMaskInterface()["sdpa"]
    AttentionInterface.register("without masks", AttentionInterface()["sdpa"])
    assert register_attention("without masks", "segment") not in AttentionMaskInterface()


def test_layers_that_do_not_count_places_ask_for_no_positions(monkeypatch):
    """Positions are an array as long as the batch: not once per layer, for models that never look at them."""
    layout = FlatLayout.from_segments(SEGMENTS["nested"])
    monkeypatch.setattr(Segments, "position_ids", property(lambda self: pytest.fail("positions were counted")))
    attend = AttentionInterface()[register_attention("sdpa", "segment")]
    attend(Attention(1), *states(SEGMENTS["nested"]), FlatMask.carrying(layout))


def test_flat_mask_keeps_its_layout_where_models_touch_it():
    mask = FlatMask.carrying(FlatLayout.from_segments(SEGMENTS["nested"]))
    offloaded = torch.empty(mask.shape, dtype=torch.bool)  # as PyTorch's `save_on_cpu(pin_memory=True)` does it
    for copied in (FlatMask.carrying(FlatLayout.from_segments(SEGMENTS["flat"])), mask):  # a buffer may be used again
        offloaded.copy_(copied)
    for touched in (mask.to(torch.float32), mask[:, :, :, :7], mask.clone(), mask.detach(), mask.to("cpu"), offloaded):
        assert isinstance(touched, FlatMask)
        assert touched.context.layout is mask.context.layout
    assert not any(map(bool, (torch.all(mask), mask.all(), (mask == 1).all())))  # models drop masks that are all true
    offloaded.copy_(torch.ones(mask.shape, dtype=torch.bool))  # a mask like any other
    assert type(offloaded) is torch.Tensor
    assert vars(offloaded) == {}


def test_a_mask_that_has_lost_its_layout_is_refused():
    mask = FlatMask.carrying(FlatLayout.from_segments(SEGMENTS["nested"])).as_subclass(torch.Tensor)
    attend = AttentionInterface()[register_attention("sdpa", "segment")]
    with pytest.raises(RuntimeError, match="was copied on its way"):
        attend(Attention(1), *states(SEGMENTS["nested"]), mask)


@pytest.mark.parametrize(
    "compute",
    [
        lambda m: m.expand(2, 1, 3, 3),
        lambda m: m[:, 0],
        lambda m: torch.cat([m, m], -1),
        lambda m: torch.zeros(3, 3) + m,
        lambda m: torch.zeros(1, 1, 3, 3).copy_(m),
    ],
    ids=["expand", "index", "concatenate", "add", "copy"],
)
def test_a_model_that_computes_with_its_mask_is_told_that_it_is_none(compute):
    mask = FlatMask.carrying(FlatLayout.from_segments(SEGMENTS["nested"]))
    with pytest.raises(RuntimeError, match="computes with its attention mask"):
        compute(mask)


CALLS = {
    "equal pairs": [(3, 4, 6, 8), (3, 4, 3, 8)],  # what holds the prompts, and what continues them
    "short": [(6, 4, 20, 8), (6, 4, 4, 8)],
    "earlier": [(1, 4, 60, 8), (8, 4, 4, 8)],
    "nested": [(1, 4, 5, 8), (1, 4, 4, 8), (1, 4, 2, 8), (1, 4, 9, 8)],  # too few to bring them into another order
}


@pytest.mark.parametrize("name", CALLS)
def test_segments_of_about_one_shape_are_one_call(monkeypatch, name):
    calls, sdpa = [], functional.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        calls.append(tuple(query.shape))
        return sdpa(query, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    ATTENTION["segment"](FlatLayout.from_segments(SEGMENTS[name]), "sdpa", Attention(1), *states(SEGMENTS[name]))
    assert calls == CALLS[name]
