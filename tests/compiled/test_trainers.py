"""With `torch_compile=True`, layers are compiled one by one, and train as padded TRL does."""

import copy
import functools
import math
import pickle
import random

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.tiny import ADAPTERS, DATA, SEED, arguments, lora, make_model
from tests.runs import ROUNDED, TOLERANCE, assert_same, make_trainer, run
from trl_paddingfree import PaddingFreeSFTConfig, PaddingFreeSFTTrainer, UnprovenModelError, padding_free
from trl_paddingfree.compiled.layers import compile_layers, compiled, make_eager
from trl_paddingfree.core import upstream
from trl_paddingfree.core.check.again import prove_again
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.recomputable import recomputable_layers

# Traces as compiling does, and leaves out the C++, which takes minutes on a CPU
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
BUDGETS = [{"max_tokens_per_micro_batch": 20}, {"memory_budget": 1}, CHECKPOINTED]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def sft_trainer(model, layout="shared", compiled=True, **options):
    """A trainer that has not trained."""
    given = {**arguments("sft", False, model), **(COMPILED if compiled else {})}
    return make_trainer("sft", layout, **given, **options)


def assert_trains_as_padded(task, make, **options):
    # Models of tests have no name that a reference could be loaded from
    both = {"steps": 2, **({"beta": 0.0} if task in ("grpo", "rloo") else {})}
    padded = run(task, "padded", **make(), **both)
    ours = run(task, "shared", **make(), **both, **COMPILED, **options)
    assert graphs()
    # Which of two equal rewards of reward models is higher is rounding
    assert_same(padded, ours, ignored=(*ROUNDED, "accuracy") if task == "reward" else ROUNDED)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("task", DATA)
def test_every_trainer(task):
    options = BUDGETS[(SEED + list(DATA).index(task)) % len(BUDGETS)]
    assert_trains_as_padded(task, lambda: arguments(task, adapters=bool(SEED % 2)), **options)


def test_a_second_trainer_of_the_same_state_compiles_too():
    """Configurations that are made first share one state, and transformers resets it with each of them."""
    configs = [PaddingFreeSFTConfig("out", use_cpu=True, bf16=False, torch_compile=True) for _ in range(2)]
    given = {**arguments("sft", False), "train_dataset": DATA["sft"](2, SEED)}
    trainers = [PaddingFreeSFTTrainer(args=config, **given) for config in configs]
    assert trainers[0]._compiler is not None
    assert trainers[0]._compiler == trainers[1]._compiler


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gemma3_text", "mixtral", "gpt_oss", "lfm2", "qwen3_next"])
def test_architectures(model_type):
    def make():
        return arguments("sft", False, tiny_model(model_type))

    assert_trains_as_padded("sft", make, max_tokens_per_micro_batch=20)


def batches(trainer, number):
    """Training steps on flat batches of other lengths."""
    for seed in range(number):
        data = [trainer.train_dataset[i] for i in random.Random(seed).sample(range(8), 3)]
        yield trainer._prepare_inputs(trainer.data_collator(data))


@ADAPTERS
def test_graphs_grow_neither_with_layers_nor_with_batches(adapters):
    found = []
    for layers in (2, 4):
        torch.compiler.reset()
        counters.clear()
        trainer = sft_trainer(make_model(num_hidden_layers=layers), peft_config=lora() if adapters else None)
        trainer.model.train()
        counted = []
        for inputs in batches(trainer, 20):
            trainer.compute_loss(trainer.model, inputs).backward()
            counted.append(graphs())
        assert counted[1:] == counted[1:2] * 19
        found.append(counted[-1])
        before = graphs()
        rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        trainer.model.eval().generate(**rows, max_new_tokens=2, do_sample=False)
        assert graphs() == before
    assert found[0] == found[1]


def test_hooks_that_come_and_go_run():
    """The compiler does not look for them by default. transformers collects the logits of routers by hooks."""
    trainer = sft_trainer(make_model())
    (inputs,) = batches(trainer, 1)
    mlp, losses = recomputable_layers(trainer.model)[0].mlp, []
    compile_them = functools.partial(compile_layers, FlatModel.of(trainer.model), {"backend": "aot_eager"})
    for make in (compile_them, functools.partial(make_eager, trainer.model)):
        make()
        for _ in range(2):
            losses.append(trainer.compute_loss(trainer.model, inputs).item())
            with mlp.register_forward_hook(lambda module, args, output: torch.nan * output):
                losses.append(trainer.compute_loss(trainer.model, inputs).item())
    assert losses[:4] == pytest.approx(losses[4:], rel=TOLERANCE, nan_ok=True)
    assert list(map(math.isnan, losses)) == [False, True] * 4


def test_copies_and_saved_models_are_eager():
    model = make_model()
    layer = recomputable_layers(sft_trainer(model).model)[0]
    eager = type(recomputable_layers(make_model())[0])
    assert eager in type(layer).__bases__
    assert type(layer).__name__ == eager.__name__
    assert type(copy.deepcopy(layer)) is eager
    assert type(pickle.loads(pickle.dumps(layer))) is eager
    sft_trainer(model, compiled=False)
    assert type(layer) is eager


def test_layers_that_cannot_be_compiled_are_named(caplog):
    model = make_model()
    first = recomputable_layers(model)[0]
    first.forward = first.forward
    sft_trainer(model)
    assert "1 of 2 layers of LlamaForCausalLM stay eager, because something has replaced their forward" in caplog.text


def test_backends_without_segments_are_refused():
    with pytest.raises(ValueError, match="`torch_compile=True`: LlamaForCausalLM computes flat batches by `mask`"):
        sft_trainer(make_model(), "flat", flat_attention="mask")


@pytest.mark.parametrize("skipped", ["", "it does not train"])
def test_compiled_code_that_computes_something_else_is_refused(skipped):
    def wrong(graph, inputs):
        return lambda *given: tuple(
            1.01 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in graph(*given)
        )

    model = make_model()
    flat = flat_model(model)
    with pytest.raises(UnprovenModelError, match="flat batches by compiled code differently from eager ones"):
        prove_again(model, variation=compiled(flat, {"backend": wrong}), skipped=skipped)


def test_padding_free_compiles_flat_calls(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile_(forward, backend="aot_eager", **options))
    model = make_model().train()
    rows = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0]])
    inputs = {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.masked_fill(rows == 0, -100)}
    expected = model(**inputs).loss
    padding_free(model, torch_compile=True)
    assert graphs()
    torch.testing.assert_close(model(**inputs).loss, expected)
    assert FlatModel.of(model).counts.computed


def louder(forward):
    """A wrapper of a layer's forward, as libraries put them on classes."""

    @functools.wraps(forward)
    def wrapped(self, hidden, *args, **kwargs):
        return forward(self, hidden, *args, **kwargs) * 1.5

    return wrapped


def plain(forward):
    """The same, as a function that says nothing of what it wraps."""
    return lambda self, hidden, *args, **kwargs: forward(self, hidden, *args, **kwargs) * 1.5


@pytest.mark.parametrize("wrap", [louder, plain])
def test_a_wrapper_on_the_class_of_layers_counts(wrap, monkeypatch, caplog):
    sft_trainer(make_model())  # a class is compiled once, by the forward that it had
    monkeypatch.setattr(LlamaDecoderLayer, "forward", wrap(LlamaDecoderLayer.forward))
    padded = run("sft", "padded", **arguments("sft", False), steps=2)
    assert_same(padded, run("sft", "shared", **arguments("sft", False), steps=2, **COMPILED))
    if upstream.layer_forward(LlamaDecoderLayer) is None:  # else transformers' own is elsewhere: this one is compiled
        assert "2 of 2 layers of LlamaForCausalLM stay eager, because something has replaced or wrapped" in caplog.text


@pytest.mark.parametrize("replaced", [LlamaDecoderLayer, LlamaAttention, LlamaMLP, LlamaRMSNorm, torch.nn.Linear])
def test_functions_that_are_replaced_on_classes_count(replaced, monkeypatch, caplog):
    trainer = sft_trainer(make_model())
    (inputs,) = batches(trainer, 1)
    model = trainer.model.train()
    rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}

    def losses():
        return [trainer.compute_loss(model, inputs), model(**rows, labels=inputs["labels"]).loss]

    def other(self, *args, before=replaced.forward, **kwargs):
        answer = before(self, *args, **kwargs)
        if self is model.get_output_embeddings():  # TRL's head does not call it
            return answer
        return (answer[0] * 1.5, *answer[1:]) if isinstance(answer, tuple) else answer * 1.5

    first = losses()
    torch.testing.assert_close(*first)
    with monkeypatch.context() as patched:
        patched.setattr(replaced, "forward", other)
        changed = losses()
        torch.testing.assert_close(*changed)
        assert abs(changed[0] - first[0]) > 1e-4  # several times what `assert_close` allows
    assert f"functions of {replaced.__name__} were replaced after layers were compiled" in caplog.text
    torch.testing.assert_close(losses(), first)
