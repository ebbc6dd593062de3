"""The start-up check: it catches every known way in which sequences leak, and nothing else."""

import copy
import socket
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.models.bamba import modeling_bamba

from tests.helpers.architectures import proven, tiny_config, tiny_model, with_head
from tests.helpers.flat_and_padded import install
from tests.helpers.folders import STATES
from tests.helpers.reference_flash import flash_attn_varlen_func, reference_flash
from tests.helpers.reference_state import reference_state_kernels
from tests.helpers.tiny import ADAPTERS, DTYPES, SEED, SHARING, lora
from trl_paddingfree import capabilities
from trl_paddingfree.core import upstream
from trl_paddingfree.core.check.comparison import NOISE_FACTOR
from trl_paddingfree.core.check.gradients import RowsInTraining, check_gradients
from trl_paddingfree.core.check.probe import LEAK_FRACTION, RowsAlone
from trl_paddingfree.core.check.prove import UnprovenModelError, check_flat, prove
from trl_paddingfree.core.flat.batch import FlatBatch
from trl_paddingfree.core.model import attention, backends, flat_model, forward, told
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.mixers import Mixers
from trl_paddingfree.core.model.routes import Route, choose_route

SEGMENT, MASK = Route("segment", "sdpa", prefix_sharing=True), Route("mask", "sdpa", prefix_sharing=True)
# What transformers knows of sequences without us: position ids that restart, and no mask
POSITIONS = Route("positions", "sdpa", prefix_sharing=False)
FLASH_POSITIONS = Route("positions", "flash_attention_2", prefix_sharing=False)


def make(model_type="llama", attention="sdpa", seed=SEED, **options):
    return with_head(tiny_model(model_type, attn_implementation=attention, seed=seed, **options))


def deep(dtype=torch.bfloat16, seed=SEED):
    """32 layers, as a trained model would be scaled: a token of context counts, rounding adds up."""
    options = {"num_hidden_layers": 32, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
    return make(dtype=dtype, seed=seed, **options)


def assert_leaks(result):
    assert result.leak > LEAK_FRACTION * result.effect
    assert not result.passed


def give(module, args, kwargs, **more):
    """A hook that gives a module more arguments."""
    return args, {**kwargs, **more}


# --- Each cause of a leak, turned on -------------------------------------------------------------------------------


def test_positions_alone_keep_sequences_apart_where_nothing_goes_wrong():
    """The control of the tests below: without their cause, the check passes."""
    assert check_flat(make(), POSITIONS).passed
    with reference_flash():
        assert check_flat(make(attention="flash_attention_2"), FLASH_POSITIONS).passed


def test_all_ones_mask_is_caught(monkeypatch):
    told = lambda model, backend, context: {"attention_mask": torch.ones_like(context.layout.seq_idx)}  # noqa: E731
    monkeypatch.setattr(Mixers, "arguments", staticmethod(told))
    assert_leaks(check_flat(make(), POSITIONS))


def test_use_cache_is_caught(monkeypatch):
    model, original = make(), forward.flat_backbone

    @contextmanager
    def with_cache(*args, **kwargs):
        hook = partial(give, use_cache=True)
        # Where ours is: this one runs after it
        with original(*args, **kwargs) as found, model.base_model.register_forward_pre_hook(hook, with_kwargs=True):
            yield found

    monkeypatch.setattr(forward, "flat_backbone", with_cache)
    assert_leaks(check_flat(model, POSITIONS))
    assert check_flat(model, SEGMENT).passed  # with a layout, a cache does no harm


@pytest.mark.parametrize("model_type", ["gpt_oss", "afmoe", "opt"])
def test_masks_built_without_position_ids_are_caught(model_type):
    model = make(model_type, attention="eager")
    assert_leaks(check_flat(model, Route("positions", "eager", prefix_sharing=False)))
    assert check_flat(model, Route("segment", "eager", prefix_sharing=True)).passed


@pytest.mark.parametrize("model_type", ["persimmon", "ctrl", "gpt_bigcode"])
def test_swallowed_position_ids_are_caught(model_type, monkeypatch):
    """Layers that use `position_ids` up leave flash attention nothing to infer boundaries from."""
    with reference_flash():
        model = make(model_type, attention="flash_attention_2")
        assert check_flat(model, FLASH_POSITIONS).passed
        monkeypatch.setattr(forward, "boundaries", lambda layout: {})
        assert_leaks(check_flat(model, FLASH_POSITIONS))


@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_swallowed_keyword_arguments_do_not_lose_the_layout(model_type):
    """These drop unknown arguments before attention, and the layout arrives all the same: in the mask."""
    model, seen = make(model_type), []

    def look(module, args, kwargs):
        if isinstance(kwargs.get("attention_mask"), told.FlatMask):
            seen.append("unknown" in kwargs)

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(look, with_kwargs=True)
    model.base_model.register_forward_pre_hook(partial(give, unknown=1), with_kwargs=True)
    assert check_flat(model, SEGMENT).passed
    assert seen
    assert not any(seen)


@SHARING
def test_a_kernel_that_ignores_boundaries_is_caught(prefix_sharing):
    def one_run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
        whole_q, whole_k = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
        return flash_attn_varlen_func(q, k, v, whole_q, whole_k, len(q), len(k), 0.0, softmax_scale, causal)

    with reference_flash(one_run):
        model = make(attention="flash_attention_2")
        assert_leaks(check_flat(model, Route("flash", "flash_attention_2", prefix_sharing=prefix_sharing)))


def test_segments_with_different_first_positions_are_caught(monkeypatch):
    """transformers takes the smallest position for the start of every sequence; a tree's branches start elsewhere."""
    monkeypatch.setattr(forward, "boundaries", lambda layout: {})
    with reference_flash():
        model = make(attention="flash_attention_2")
        assert check_flat(model, FLASH_POSITIONS).passed
        original = FlatBatch.from_rows

        def shifted(*args, **kwargs):
            batch = original(*args, **kwargs)
            batch.position_ids.add_(batch.layout.seq_idx)  # rotary embeddings do not mind
            return batch

        monkeypatch.setattr(FlatBatch, "from_rows", shifted)
        assert_leaks(check_flat(model, FLASH_POSITIONS))


@pytest.mark.parametrize("window", [8, 2047])
def test_a_window_that_does_not_reach_attention_is_caught_however_wide_it_is(window):
    """PhiMoE makes masks with its window, and does not tell attention of it."""
    model = make("phimoe", sliding_window=window)
    result, failed = prove(model, choose_route(model))
    assert [r.route.backend for r in failed] == ["segment", "segment"]
    assert (result.route.backend, result.prefix_sharing) == ("mask", True)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("mistral", "sliding_window"),
        ("gemma3_text", "sliding_window"),
        ("llama4_text", "attention_chunk_size"),
        # Which it calls `sliding_window`, too
        pytest.param("recurrent_gemma", "attention_window_size", marks=STATES),
    ],
)
def test_limits_that_were_narrowed_are_as_wide_as_before(model_type, name):
    model = make(model_type, **{name: 2048})
    layers, seen = model.base_model.layers, set()
    layers[1] = copy.deepcopy(layers[1])  # with its own configuration
    configs = upstream.configs_of(model.modules())
    model.base_model.register_forward_pre_hook(lambda *_: seen.update(getattr(each, name) for each in configs))
    assert check_flat(model, choose_route(model)).passed
    assert seen == {8}
    assert {getattr(each, name) for each in configs} == {2048}
    assert {vars(module)[name] for module in model.modules() if vars(module).get(name)} <= {2048}


def test_a_state_that_passes_on_is_caught(monkeypatch):
    monkeypatch.setattr(flat_model, "mixers_of", lambda model: Mixers())
    assert_leaks(check_flat(make("lfm2"), SEGMENT.without_sharing()))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "mamba2", "bamba", "rwkv"])
def test_without_what_knows_their_layers_models_with_a_state_are_refused_by_name(monkeypatch, model_type):
    is_there = capabilities.is_there
    monkeypatch.setattr(capabilities, "is_there", lambda name: name != "recurrent" and is_there(name))
    model = make(model_type, "eager")
    with pytest.raises(UnprovenModelError, match=f"^{type(model).__name__} does not treat a flat batch") as refused:
        prove(model, choose_route(model))
    assert "It carries state from token to token, in layers that this package does not know." in str(refused.value)


@STATES
def test_a_kernel_of_training_that_ignores_boundaries_is_caught(monkeypatch):
    """Mamba layers take a fused kernel in training, and another in evaluation."""
    model = make("bamba")
    size = model.config.hidden_size
    with reference_state_kernels(model):
        assert check_flat(model, SEGMENT.without_sharing()).passed
        mix = lambda states, *args, **kwargs: states[..., :size].cumsum(1)  # noqa: E731
        monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", mix)
        assert_leaks(check_flat(model, SEGMENT.without_sharing()))


def one_token_off(by):
    """Attention whose segments see `by` more keys than theirs: 1, the last token of the row before; -1, one too few."""

    def attend(layout, previous, module, query, key, value, **kwargs):
        segments = layout.segments
        outputs = []
        for i, (first, last) in enumerate(pairwise(segments.offsets)):
            begin = first if i == 0 else max(0, min(first - by, last - 1))
            mask = torch.ones(last - first, last - begin, dtype=torch.bool).tril(first - begin)
            mask |= torch.eye(last - first, last - begin, dtype=torch.bool)  # a query without keys is NaN
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, :, first:last],
                    *(x[:, :, begin:last].repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value)),
                    attn_mask=mask,
                ).transpose(1, 2)
            )
        return torch.cat(outputs, 1), None

    return attend


@DTYPES
@pytest.mark.parametrize("by", [1, -1], ids=["leak", "loss"])
def test_one_token_of_context_too_many_or_too_few_is_caught_in_32_layers(by, dtype, monkeypatch):
    model = deep(dtype)
    assert check_flat(model, SEGMENT.without_sharing()).passed
    monkeypatch.setitem(backends.ATTENTION, "segment", one_token_off(by))
    result = check_flat(model, SEGMENT.without_sharing())
    assert not result.passed
    if by == 1:
        assert result.leak > LEAK_FRACTION * result.effect


def test_a_process_on_which_a_model_raises_asks_the_others_as_often_as_one_on_which_it_answers(monkeypatch):
    """Each question waits for the answers of all: one that is not asked pairs with another one."""
    model, asked = make(), []

    def agree(verdict):
        asked[-1].append(verdict)
        return False  # it raises on one of them

    def fail(*args, **kwargs):
        raise RuntimeError("a kernel that this device has not")

    for attend in (attention.segment_attention, fail):
        monkeypatch.setitem(backends.ATTENTION, "segment", attend)
        asked.append([])
        with pytest.raises(UnprovenModelError):
            prove(model, SEGMENT, fallback=False, agree=agree)
    answered, raised = asked
    assert len(answered) == len(raised) > 2


# --- Nothing else --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [SEGMENT, MASK], ids=lambda r: r.backend)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", [SEED, SEED + 1], ids=lambda s: f"seed{s}")
def test_a_correct_low_precision_model_of_32_layers_passes(seed, dtype, route):
    model = deep(dtype, seed)
    reference = RowsAlone(model)
    for prefix_sharing in (False, True):
        result = check_flat(model, replace(route, prefix_sharing=prefix_sharing), reference)
        assert result.passed, result


def test_tolerance_follows_the_model_and_its_dtype():
    """The unit of rounding of bfloat16 is 2^16 times that of float32, and so is the tolerance, within a few bits."""
    tolerances = [RowsAlone(deep(dtype)).tolerance for dtype in (torch.float32, torch.bfloat16)]
    assert 2**12 < tolerances[1] / tolerances[0] < 2**20


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_correct_mixture_in_bfloat16_passes(model_type):
    assert proven(make(model_type, attention=None, dtype=torch.bfloat16)).prefix_sharing


@ADAPTERS
@pytest.mark.parametrize("model_type", ["gemma2", "llama", pytest.param("qwen3_5_text", marks=STATES)])
def test_what_is_exact_in_float32_is_exact_in_float64(model_type, adapters):
    """Some layers compute in float32 in any dtype, and eager attention in float64 may make NaN of padding."""
    model = make(model_type, attention="eager", dtype=torch.float64)
    assert proven(adapted(model) if adapters else model).prefix_sharing


def off_on_flat_batches(model, often):
    """A call of `model` that gets one token of its first flat batches wrong."""
    calls = 0

    def call(**inputs):
        nonlocal calls
        output = model(**inputs)
        if "flat_batch" in inputs and (calls := calls + 1) <= often:
            output.log_probs[0, 3] += 3.0  # one of some twenty tokens, far above what bfloat16 explains
        return output

    return call


@pytest.mark.parametrize(
    ("model_type", "dtype", "often", "passes"),
    [
        ("mixtral", torch.bfloat16, 5, True),  # a draw takes five flat batches
        ("mixtral", torch.float32, 5, True),
        ("llama", torch.bfloat16, 5, True),
        ("llama", torch.float32, 5, False),
        ("mixtral", torch.bfloat16, 1, False),
        ("mixtral", torch.bfloat16, 1000, False),
        ("mixtral", torch.float32, 1000, False),
    ],
    ids=["rounding", "in-float32", "of-sums", "mistake-in-float32", "leak", "mistake", "mistake-of-experts"],
)
def test_only_what_happens_again_with_other_tokens_counts_where_rounding_decides(model_type, dtype, often, passes):
    """
    A token that rounding sends to another expert, in any precision, is no mistake, if it goes there whatever stands in
    other rows. In float32 and without experts, it is no rounding.
    """
    model = make(model_type, dtype=dtype)
    route, call = choose_route(model), off_on_flat_batches(model, often)
    with nullcontext() if passes else pytest.raises(UnprovenModelError):
        result, failed = prove(model, route.without_sharing(), fallback=False, call=call)
        assert result.passed
        assert not failed


def adapted(model):
    return get_peft_model(model, lora()).get_base_model()


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def on_several_devices(model):
    """Accelerate's hooks on every layer, as `device_map` puts them, which move every argument."""
    devices = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    return dispatch_model(model, {**devices, "model.layers.0": "cpu", "model.layers.1": "cpu"}, force_hooks=True)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    # bitsandbytes quantizes blocks of 64 weights
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "autocast", "lora", "checkpointed", "devices", "4bit"])
def test_check_works_on_every_kind_of_model_and_leaves_it_as_it_was(kind, request, monkeypatch):
    if kind == "4bit":
        model = with_head(request.getfixturevalue("quantized"))
    else:
        model = make(dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
        wrap = {"lora": adapted, "checkpointed": checkpointed, "devices": on_several_devices}.get(kind, lambda m: m)
        model = wrap(model)
    autocast = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext()
    model.train()
    model.get_input_embeddings().eval()  # training modes differ between modules, and stay so
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(socket.socket, "connect", None)  # no network

    def state():
        modes = [module.training for module in model.modules()]
        kept = [[p.requires_grad, p.grad, p] for p in model.parameters()]
        return copy.deepcopy([modes, torch.is_grad_enabled(), torch.get_rng_state(), kept])

    before = state()
    with autocast:
        assert proven(model).prefix_sharing
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


def test_check_restores_the_random_state_of_a_model_that_draws():
    model, drawn = make(), []
    model.base_model.register_forward_pre_hook(lambda module, args: drawn.append(torch.rand(3)))
    before = torch.get_rng_state()
    assert check_flat(model, SEGMENT).passed
    assert drawn
    assert torch.equal(before, torch.get_rng_state())


def test_check_costs_a_few_thousand_tokens():
    """
    About one micro-batch of ordinary length, forward and backward, and forward once more in evaluation mode: around 1 %
    of a run of a hundred of them.
    """
    model, tokens = make(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    proven(model)
    assert sum(tokens) < 11 * 512


# --- What it does about it -----------------------------------------------------------------------------------------


def test_a_model_without_an_attention_function_gets_a_mask():
    result = proven(make("falcon"))
    assert (result.route.backend, result.prefix_sharing) == ("mask", True)


def test_a_model_that_is_exact_flat_but_not_shared_trains_flat():
    # Its ALiBi counts along the flat row, which does not matter without sharing
    model = make("mpt", attention=None, max_seq_len=4096)
    result, failed = prove(model, choose_route(model))
    assert not result.prefix_sharing
    assert [r.prefix_sharing for r in failed] == [True]


def test_refusal_names_the_model_the_figures_and_what_to_do():
    model = make("roberta")
    with pytest.raises(UnprovenModelError) as error:
        proven(model)
    for part in ("RobertaForCausalLM", "(error", "allowed", "segment", "mask", "padding_free=False"):
        assert part in str(error.value)


def test_an_explicit_route_is_used_or_refused():
    model = make("phimoe", sliding_window=2047)
    with pytest.raises(UnprovenModelError):
        prove(model, choose_route(model, "segment"), fallback=False)
    assert FlatModel.of(model).route.backend == "segment"
    with pytest.raises(ValueError, match="takes no mask"), reference_flash():
        choose_route(make(attention="flash_attention_2"), "mask")


def test_a_model_that_padding_changes_is_not_believed():
    """Where padded rows differ from rows alone by more than rounding, agreement within that means nothing."""

    def read_the_width(module, args, kwargs, output):
        width = min(kwargs["input_ids"].size(1), 25)
        output.last_hidden_state = output.last_hidden_state * (1 + width / 1000)
        return output

    model = make()
    model.base_model.register_forward_hook(read_the_width, with_kwargs=True)
    result = check_flat(model, SEGMENT.without_sharing())
    assert result.error < 4 * result.noise
    assert not result.passed


@DTYPES
@pytest.mark.parametrize("model_type", ["gemma3_text", pytest.param("lfm2", marks=STATES), "gpt2"])
def test_a_model_with_many_new_tokens_is_exact(model_type, dtype):
    """New tokens have one embedding, the mean of the others: one of them in the place of another changes nothing."""
    model = tiny_model(model_type, attn_implementation="sdpa", seed=SEED, initializer_range=0.02)
    model.resize_token_embeddings(300)
    result = proven(with_head(model.to(dtype)))
    assert result.effect > NOISE_FACTOR * result.noise  # of 25 seeds, 8 times as large at least


def indifferent():
    """Weights so small that context does next to nothing: less than 1e-3 of it is less than float32 rounds."""
    return make("gpt2", initializer_range=0.0003)


def test_a_model_that_context_hardly_moves_is_exact():
    result = check_flat(indifferent(), SEGMENT)
    assert result.passed
    assert result.leak_tolerance < result.tolerance < LEAK_FRACTION * result.effect * 1.01


def test_a_leak_below_the_rounding_of_answers_is_a_leak():
    model = indifferent()
    expected = check_flat(model, SEGMENT)

    def leak(module, args, output):
        if output.size(0) > 1:  # rows alone, and beside each other
            return output
        return output + 2e-3 * output.mean(1, keepdim=True)

    model.transformer.ln_f.register_forward_hook(leak)
    result = check_flat(model, SEGMENT)
    assert expected.leak_tolerance < result.leak < expected.tolerance
    assert result.error < result.tolerance
    assert result.verdict == "LEAKS"


def test_rows_that_are_apart_and_inexact_are_refused_in_these_words():
    model = make()

    def coarse(module, args, output):
        return output.half().to(output.dtype) if output.size(0) == 1 and output.size(1) > 20 else output

    model.model.layers[0].mlp.register_forward_hook(coarse)
    with pytest.raises(
        UnprovenModelError, match=r"apart, but computes them inexactly(.|\n)*no leak between(.|\n)*No row moves"
    ):
        proven(model)


def test_an_answer_of_nan_does_not_pass():
    model = make()
    model.lm_head.weight.data.fill_(float("nan"))
    assert not check_flat(model, SEGMENT.without_sharing()).passed


@pytest.mark.parametrize("trains", ["all", "adapters"])
def test_a_weight_that_holds_nan_is_named_and_padding_is_not_blamed(trains):
    model = make()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.lm_head.bias = torch.nn.Parameter(torch.tensor([float("inf")] * model.vocab_size))
    call = get_peft_model(model, lora()) if trains == "adapters" else None
    name = "model.layers.1.mlp.up_proj." + ("base_layer." if call else "") + "weight"
    with pytest.raises(UnprovenModelError, match="or without: its answers to a row alone hold NaN") as caught:
        proven(model, call=call)
    assert f"`{name}`" in str(caught.value)
    assert "lm_head.bias` hold NaN or infinity." in str(caught.value)
    assert "begin" not in str(caught.value)


def test_tokens_whose_embeddings_hold_nan_are_not_drawn():
    """TRL trains if the data has none of them."""
    model = make(tie_word_embeddings=False)
    model.get_input_embeddings().weight.data[torch.arange(0, model.vocab_size, 3)] = float("nan")
    result = proven(model)
    assert not result.not_compared
    assert not (RowsAlone(model).tokens % 3 == 0).any()


def test_an_expert_that_holds_nan_is_named_if_no_short_row_meets_it():
    model = make("mixtral")
    reference = RowsInTraining(model)
    model.lm_head.weight.data[:1] *= float("inf")
    reference.alone = reference.alone._replace(at_tokens=reference.alone.at_tokens * float("nan"))
    install(model)
    skipped = check_gradients(reference.model, lambda: reference, prefix_sharing=True).skipped
    assert "not finite: `lm_head.weight` holds NaN or infinity" in skipped


@pytest.mark.parametrize("zero", ["lm_head.", "model.norm."])
def test_a_model_whose_answers_do_not_depend_on_its_input_is_refused_in_these_words(zero):
    model = make()
    for name, parameter in model.named_parameters():
        if name.startswith(zero):
            torch.nn.init.zeros_(parameter)
    call = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    expected = rf"answers do not depend on its input.*`{zero}weight`, which is frozen, hold nothing but zeros"
    with pytest.raises(UnprovenModelError, match=expected):
        proven(model, call=call)


def test_the_route_follows_the_implementation_in_force():
    """trl#2834: GPT-OSS has no SDPA: what was asked for, or left open, is not what it runs."""
    assert choose_route(make("gpt_oss", attention=None)).loaded_with == "eager"


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_three_axes_of_positions_are_not_boundaries(model_type):
    """transformers#38007, also #44911, #40490: multi-axis positions, on text, with and without flash attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    for loaded in ("sdpa", "flash_attention_2"):
        with reference_flash():
            config = tiny_config(model_type)
            config.text_config.rope_parameters = rope
            model = AutoModelForImageTextToText.from_config(config, attn_implementation=loaded).eval()
            result = proven(with_head(model))
        assert result.route.backend == ("segment" if loaded == "sdpa" else "flash")
        assert result.prefix_sharing
