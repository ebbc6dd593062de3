"""The check's pass as training will be: models that are wrong only there are caught, and nothing else is."""

import copy
import itertools
import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LilyConfig, LoraConfig, ShiraConfig, get_peft_model

from tests.core.check.test_mutations import leak as mixed
from tests.core.check.test_prove import SEGMENT, make
from tests.helpers.architectures import MODEL_TYPES, NOT_BUILT, proven, with_head
from tests.helpers.flat_and_padded import install, noise_of
from tests.helpers.folders import STATES
from tests.helpers.tiny import DTYPES, REENTRANT, SEED, SHARING, make_model
from trl_paddingfree.core.check import probe, training
from trl_paddingfree.core.check.gradients import RowsInTraining, check_gradients
from trl_paddingfree.core.check.probe import rounding_unit, tried_tokens
from trl_paddingfree.core.check.prove import UnprovenModelError, check_flat, prove
from trl_paddingfree.core.check.training import as_in_training, moved_off_zero
from trl_paddingfree.core.flat.batch import FlatBatch
from trl_paddingfree.core.model import attention, backends, mixers
from trl_paddingfree.core.model.restored import attributes_set
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.model.told import FlatMask


class LeakBackward(torch.autograd.Function):
    """The identity, whose gradient passes on to the token before."""

    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.3 * grad.roll(-1, 1)


ALTERED = {
    "training": lambda module, x: mixed(x) if module.training else x,
    "gradients": lambda module, x: mixed(x) if torch.is_grad_enabled() else x,
    "backward": lambda module, x: LeakBackward.apply(x),
    "over-200-tokens": lambda module, x: mixed(x) if x.size(1) > 200 else x,
}


def altered(kind, **options):
    """A model that leaks from row to row, but not where rows are alone: those are the reference, whatever they say."""
    model = make(**options)

    def leak(module, args, output):
        # One row at a time is the flat one: rows of a batch are beside each other, and stay apart
        return ALTERED[kind](module, output) if output.size(0) == 1 else output

    model.base_model.layers[0].mlp.register_forward_hook(leak)
    return model


@DTYPES
@SHARING
@pytest.mark.parametrize("kind", ALTERED)
def test_a_model_that_leaks_only_as_it_trains_is_refused_with_the_rows(kind, prefix_sharing, dtype):
    model = altered(kind, dtype=dtype)
    assert check_flat(model, SEGMENT).passed  # what it says in evaluation mode of a few short rows is right
    with pytest.raises(UnprovenModelError, match=r"As it trains, row \d gets gradient"):
        prove(model, choose_route(model, prefix_sharing=prefix_sharing))


def forgetful(tokens):
    """Attention of segments that forget the first tokens of what they continue, if that is far away."""

    def attend(layout, *args, **kwargs):
        segments = layout.segments
        if segments.num_tokens > 200:
            for i, start in enumerate(segments.starts):
                if start > tokens:
                    layout = copy.copy(layout)
                    far = torch.full((segments.lengths[i], start + segments.lengths[i]), True).tril(start)
                    far[:, :tokens] = False
                    vars(layout).setdefault("_derived", {})[
                        "segment_mask", ((start, segments.lengths[i]),), None, None, None
                    ] = far[None, None]
        return attention.segment_attention(layout, *args, **kwargs)

    return attend


@DTYPES
@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_that_forgets_the_start_of_its_prefix_is_named(layers, dtype, monkeypatch):
    model = make(dtype=dtype, num_hidden_layers=layers)
    monkeypatch.setitem(backends.ATTENTION, "segment", forgetful(40))
    result = check_flat(model, SEGMENT, in_training=lambda: RowsInTraining(model))
    # Several layers see what the others of the prefix know of its start. Which row is named is a matter of the weights
    continuing = "".join(map(str, probe.CONTINUED))
    expected = "row 1 forgets 40 of its tokens" if layers == 1 else rf"gradients of row [{continuing}] are wrong"
    assert re.match(expected, result.gradients.reason)
    assert not result.passed
    assert check_flat(model, SEGMENT.without_sharing(), in_training=lambda: RowsInTraining(model)).passed


@DTYPES
def test_long_rows_of_a_model_that_does_not_train_are_compared_without_gradients(dtype, monkeypatch):
    model = make(dtype=dtype)
    frozen = partial(RowsInTraining, model, trains=False)
    result = check_flat(model, SEGMENT, in_training=frozen)
    assert result.passed
    assert re.search("answers on (long rows|a flat row of more than 512 tokens) ", str(result))
    assert not result.not_compared
    monkeypatch.setitem(backends.ATTENTION, "segment", forgetful(40))
    result = check_flat(model, SEGMENT, in_training=frozen)
    assert re.match("answers on long rows are wrong by", result.gradients.reason)
    assert not result.passed
    assert result.isolated  # no row moves with others: as of models that train, rounding gets more than one draw


@pytest.mark.parametrize("is_rounding", [False, True])
def test_wrong_numbers_are_caught_where_the_right_tokens_carry_gradient(is_rounding, monkeypatch):
    """But not if layers say that they round as much: recurrences do whose chunks start elsewhere on the flat axis."""

    def scaled(layout, previous, module, query, *states, **kwargs):
        if 200 < layout.segments.num_tokens < 1024:
            query = query * 1.01
        return attention.segment_attention(layout, previous, module, query, *states, **kwargs)

    model = make(max_position_embeddings=8192)
    monkeypatch.setitem(backends.ATTENTION, "segment", scaled)
    if is_rounding:
        attentions = [layer.self_attn for layer in model.model.layers]
        more = [(each, "scaling", each.scaling * 1.01) for each in attentions]
        known = SimpleNamespace(rounding=lambda model: [attributes_set(more)], found=lambda model: False)
        monkeypatch.setattr(mixers, "mixers", lambda: known)
    result = check_flat(model, SEGMENT, in_training=lambda: RowsInTraining(model))
    assert not result.gradients.failure
    assert (result.gradients.error <= result.gradients.tolerance) == is_rounding
    assert result.passed == is_rounding


def test_gpt_neo_with_a_prefix_beyond_its_window_trains_without_sharing():
    """Its local mask is a buffer over the flat axis: a prefix that lies further away is cut off."""
    model = make("gpt_neo", attention=None, window_size=256, max_position_embeddings=4096)
    result, failed = prove(model, choose_route(model))
    assert not result.prefix_sharing
    assert ["gradients of row" in one.gradients.reason for one in failed] == [True]


def test_doge_beyond_its_window_is_refused():
    model = make("doge", attention=None, keep_window_size=2048)
    with pytest.raises(UnprovenModelError):
        proven(model)
    assert model.config.keep_window_size == 2048


def test_an_adapter_that_mixes_rows_is_refused_though_it_has_not_trained():
    """PEFT's Lily takes the mean of a router over all tokens of a batch; its output is zero at the start."""
    model = make()
    call = get_peft_model(model, LilyConfig(r=4, target_modules="all-linear", stride_A=1, num_B=2))
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(UnprovenModelError, match=r"row \d gets gradient"):
        proven(model, call=call)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("model_type", ["opt", "phimoe"])
def test_a_model_that_draws_in_training_is_proven_by_its_tokens(model_type):
    """OPT's dropout is a function, and off for the check; what PhiMoE draws has no switch."""
    model = make(model_type, attention=None, dropout=0.1, attention_dropout=0.1)
    model.train()
    result = proven(model)
    assert result.prefix_sharing
    assert bool(result.gradients.skipped) == (model_type == "phimoe")


@REENTRANT
def test_gradients_of_a_checkpointed_model_are_read_and_leave_no_trace(reentrant):
    model = get_peft_model(make(), LoraConfig(r=4, target_modules="all-linear")).get_base_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained[::2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    result = proven(model)
    assert not result.gradients.notes
    assert 0 < result.gradients.error < result.gradients.tolerance
    assert all((p.grad == 3.0).all() for p in trained[::2])
    assert all(p.grad is None for p in trained[1::2])
    assert all(not p.any() for name, p in model.named_parameters() if "lora_B" in name)


class NoGradient(torch.autograd.Function):
    """A product whose gradient does not reach what was multiplied, as of a kernel for inference."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.shape = x.shape
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        return (grad.new_zeros(ctx.shape) if Inference.gives == "zeros" else None), None


class Inference(torch.nn.Linear):
    gives = "none"

    def forward(self, x):
        return super().forward(x.detach()) if self.gives == "detached" else NoGradient.apply(x, self.weight)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("gives", ["none", "zeros", "detached"])
def test_a_frozen_layer_that_passes_no_gradient_on_is_named(gives, checkpointing, monkeypatch):
    """Adapters before it would train on what goes around it, with padding and without, and no figure would tell."""
    monkeypatch.setattr(Inference, "gives", gives)
    model = make()
    layer = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = Inference(layer.in_features, layer.out_features, bias=False)
    call = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    with pytest.raises(
        UnprovenModelError, match=r"`model\.layers\.1\.mlp\.down_proj` \(Inference\), which is frozen\."
    ):
        proven(model, call=call)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Linear))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "deepseek_v3", "gemma3_text", "lfm2", "falcon_h1"])
def test_frozen_layers_of_sound_models_pass_gradients_on(model_type):
    model = make(model_type, attention=None).requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad = True  # TRL's head is not called as a layer
    assert RowsInTraining(model).lost == []


def test_frozen_blocks_of_zeros_which_models_are_expanded_by_are_sound():
    model = make().requires_grad_(False)
    torch.nn.init.zeros_(model.model.layers[1].mlp.down_proj.weight)
    assert proven(model, call=get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))).passed


def test_a_table_that_no_gradient_has_to_come_through_is_no_frozen_layer():
    model = make()
    model.model.rotary_emb.register_buffer("cos_cached", torch.randn(8, 8))  # as models with code of their own have it
    assert RowsInTraining(model).lost == []


def test_a_row_that_is_longer_than_the_positions_is_refused_with_the_reason():
    model = make("mpt", attention=None, max_seq_len=512)
    with pytest.raises(UnprovenModelError, match=r"520 tokens, more than the 512 positions of its conf"):
        proven(model)


@pytest.mark.parametrize("model_type", ["big_bird", "gpt_neo", "mpt", "roformer"])
def test_a_flat_row_beyond_what_the_check_reaches_is_refused_with_the_fix(model_type):
    """Their tables and masks are as long as the longest row, however short the rows are."""
    model = make(model_type, attention=None)
    install(model, prefix_sharing=False)
    batch = FlatBatch.from_rows([[1] * 300] * 2, [[1] * 300] * 2, prefix_sharing=False)
    rows = torch.ones(2, 300, dtype=torch.long)
    with pytest.raises(ValueError, match="`max_tokens_per_micro_batch=512`"):
        model(input_ids=rows, labels=rows, flat_batch=batch, fused_lm_head=True)


@STATES
def test_padding_whose_embedding_is_zero_is_in_no_row():
    """Its gradient, which norms multiply by 1e10 here, would be one of rounding alone."""
    model = make("bamba", attention=None, seed=65001, attn_layer_indices=[])
    proven(model.train())
    padding = model.get_input_embeddings().padding_idx
    assert padding not in itertools.chain(*RowsInTraining(model).rows)
    get_peft_model(model, LoraConfig(target_modules=["embed_tokens"]))  # whose layer only holds the embeddings
    assert padding not in tried_tokens(model)


def test_the_check_says_what_it_would_have_found():
    """In bfloat16, that is a large part of what one token of context does; leaks show at any size."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        result = proven(make(dtype=dtype))
        found[dtype] = result.smallest_mistake
        assert f"smallest detectable error {result.smallest_mistake:.0e} of one context token" in str(result)
    assert 0 < found[torch.float32] < 1e-4 < found[torch.bfloat16] < 0.3


@pytest.mark.models
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NOT_BUILT])
def test_flat_rows_longer_than_the_positions_train_or_are_refused(model_type):
    model = make(model_type, attention=None)
    try:
        result, _ = prove(model, choose_route(model))
    except (UnprovenModelError, RuntimeError, AttributeError, TypeError, IndexError):
        return  # refused, or TRL cannot train it
    rows = torch.randint(1, 96, (4, 180), generator=torch.Generator().manual_seed(SEED))
    batch = FlatBatch.from_rows(rows.tolist(), rows.tolist(), prefix_sharing=result.prefix_sharing)
    inputs = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
    padded = model.eval()(**inputs, fused_lm_head=True, use_cache=False).log_probs
    flat = model(**inputs, flat_batch=batch, fused_lm_head=True, use_cache=False).log_probs
    assert float((flat - padded).abs().max()) < 1e-3  # float32 on CPU; a wrong context moves them by more than 0.1
    flat.sum().backward()


def test_weights_buffers_and_dropout_are_as_before():
    model = get_peft_model(make(attention_dropout=0.1), LoraConfig(r=4, lora_dropout=0.2)).get_base_model()
    model.register_buffer("count", torch.zeros(3))
    model.register_forward_pre_hook(lambda module, args: [module.count.add_(1), None][1])

    def state():
        rates = [getattr(module, "p", getattr(module, "attention_dropout", None)) for module in model.modules()]
        return copy.deepcopy([model.state_dict(), rates, torch.get_rng_state()])

    def fail():
        with as_in_training(model):
            model(input_ids=torch.tensor([[1, 2, 3]]))
            torch.rand(3)
            assert all(p.any() for name, p in model.named_parameters() if "lora_B" in name)
            assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail()
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


def test_a_model_without_watched_embeddings_is_refused():
    model = make()
    reference = RowsInTraining(model)
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.detach())
    assert not check_gradients(model, lambda: reference, prefix_sharing=False).passed


def deep(monkeypatch):
    """Eight layers, with a window and without in turns, of a model that is taken for a large one."""
    monkeypatch.setattr(training, "_MOST", (0,))
    return with_head(make_model("gemma2", num_hidden_layers=8))


def test_of_layers_of_one_kind_in_a_large_model_the_first_and_the_last_compute_and_the_others_are_named(monkeypatch):
    model = deep(monkeypatch)
    layers = model.model.layers
    layers[4].self_attn.scaling = 0.5  # one of its own kind
    computed, before = [], [layer.forward for layer in layers]

    def note(module, args, output):
        computed.append(next(i for i, layer in enumerate(layers) if layer.mlp is module))

    for layer in layers:
        layer.mlp.register_forward_hook(note)
    with as_in_training(model) as left_out:
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert computed == [0, 1, 4, 6, 7]
    assert ["3 of 8 `layers` (2, 3, 5)" in each for each in left_out] == [True]
    assert [layer.forward for layer in layers] == before
    with as_in_training(model, every_layer=True):
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert computed[5:] == [*range(8)]
    result = proven(model)
    assert "were left out" in str(result.not_compared)
    monkeypatch.setattr(training, "_ENTRIES", 100)
    result = proven(model)
    assert "weights, large or sharded, were not compared" in str(result.not_compared)


def test_layers_that_run_several_times_are_not_left_out(monkeypatch):
    model = deep(monkeypatch)
    model.model.layers = torch.nn.ModuleList([*model.model.layers[:2]] * 4)
    assert "left out" not in str(proven(model).not_compared)


def test_the_gradient_of_a_large_weight_is_compared_along_one_direction(monkeypatch):
    monkeypatch.setattr("trl_paddingfree.core.check.gradients._WHOLE", 100)
    model = make()
    weight = model.model.layers[1].mlp.down_proj.weight
    assert proven(model).passed

    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: x @ (weight if x.size(0) > 1 else 0.5 * weight + 0.5 * weight.detach()).T
    with pytest.raises(UnprovenModelError, match=r"gradients of `model.layers.1.mlp.down_proj.weight` are wrong by 5"):
        proven(model)


def test_the_gradient_of_a_long_vector_is_compared_whole(monkeypatch):
    """SHiRA's adapters are vectors of one number for each entry that they change."""
    monkeypatch.setattr("trl_paddingfree.core.check.gradients._WHOLE", 100)
    model = make()
    adapted = get_peft_model(model, ShiraConfig(r=4, target_modules=["down_proj"]))
    assert any(p.requires_grad and p.ndim == 1 and p.numel() > 100 for p in adapted.parameters())
    assert proven(model).passed


@pytest.mark.parametrize("error", [RuntimeError, KeyError, torch.OutOfMemoryError])
def test_rows_alone_that_raise_in_training_are_a_failure(error):
    """No route can mend it, and flat rows that raise nothing would train unseen."""
    model = make()

    def refuse(module, args, kwargs):
        if module.training and not isinstance(kwargs.get("attention_mask"), FlatMask):
            raise error("no kernel for training")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(UnprovenModelError, match=f"or without: a row alone raises {error.__name__}: .?no ker"):
        proven(model)


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_that_fails_while_others_wait_for_its_weights_raises_unless_all_fail(number, monkeypatch):
    """No collective could tell the others: they wait in another one."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(training.upstream, "process_store", lambda: store)
    monkeypatch.setattr(training.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(training, "_SECONDS", 0.3)
    monkeypatch.setattr(training, "_FAILURES", itertools.repeat(0))
    raised = []

    def fail():
        model = make()
        next(model.parameters()).ds_id = 0
        try:
            training.raise_if_others_wait(model, RuntimeError("no kernel"))
        except training.OthersWaitError as error:
            raised.append(error)

    threads = [threading.Thread(target=fail) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == (number == 1)


def test_adapters_move_off_zero_where_autocast_has_kept_them_as_they_were():
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", torch.bfloat16):
        before = model(ids).logits
        with moved_off_zero([*model.modules()]):
            moved = model(ids).logits
        after = model(ids).logits
    assert torch.equal(before, after)
    assert not torch.equal(before, moved)


def test_noise_of_training_is_off_while_gradients_are_compared():
    model = make()
    install(model)
    noise_of(model)
    result = check_gradients(model, lambda: RowsInTraining(model), prefix_sharing=True)
    assert result.passed
    assert not result.skipped
    assert model.get_input_embeddings().neftune_noise_alpha == 5


@pytest.mark.parametrize("where", ["flat", "gradients", "reference"])
def test_a_route_without_memory_to_try_it_does_not_pass(where, monkeypatch):
    model = make()
    forward = model.model.forward

    def fail(*args, **kwargs):
        is_flat = isinstance(kwargs.get("attention_mask"), FlatMask)
        if is_flat if where == "flat" else torch.is_grad_enabled() and is_flat == (where == "gradients"):
            raise torch.OutOfMemoryError("no room")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", fail)
    if where == "reference":  # which says nothing of any route: none passes
        with pytest.raises(UnprovenModelError, match="a row alone raises OutOfMemoryError: no room"):
            proven(model)
    else:
        result, failed = prove(model, choose_route(model))
        assert "OutOfMemoryError: no room" in str(failed[0])
        assert result.route.backend == "mask"


def test_tf32_rounds_products_to_three_digits(monkeypatch):
    model = make()
    assert rounding_unit(model) == torch.finfo(torch.float32).eps
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    products = torch.backends.cuda.matmul
    before = products.fp32_precision  # no attribute that could be patched
    try:
        products.fp32_precision = "tf32"
        assert rounding_unit(model) == 2**-10
        with torch.autocast("cpu", torch.bfloat16):
            assert rounding_unit(model) == torch.finfo(torch.bfloat16).eps
    finally:
        products.fp32_precision = before
