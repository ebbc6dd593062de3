"""A model is exported and compiled whole as transformers made it: after training, and outside of calls of ours."""

import copy
import pickle

import pytest
import torch

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import install
from tests.helpers.tiny import ADAPTERS, arguments, make_model
from tests.runs import TOLERANCE, run
from trl_paddingfree import FlatModel, padding_free

IDS = torch.tensor([[3, 4, 5, 6, 9], [3, 4, 7, 8, 10]])
MASK = torch.ones_like(IDS)
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
# What makes a call without Python of a model: each raises if anything in it cannot be traced
WAYS = {
    "export": lambda model: torch.export.export(model, (), INPUTS).module(),
    "strict export": lambda model: torch.export.export(model, (), INPUTS, strict=True).module(),
    "compile": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def in_place(model):
    model = copy.deepcopy(model)
    model.compile(fullgraph=True, backend="aot_eager")
    return model


ALL = (*WAYS.values(), in_place)


def assert_traced(model, ways=ALL):
    """Each way gives what the model does."""
    with torch.no_grad():
        expected = model.eval()(**INPUTS).logits
        for way in ways:
            torch.testing.assert_close(way(model)(**INPUTS).logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.drawn(2)
@ADAPTERS
@pytest.mark.parametrize("task", ["sft", "dpo", "reward"])
def test_trained_models(task, adapters):
    trainer = run(task, "shared", steps=1, **arguments(task, adapters)).trainer
    model = trainer.model.merge_and_unload() if adapters else trainer.model
    assert FlatModel.of(model)
    assert_traced(model)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("gemma2", "eager"), ("gpt_oss", "eager"), ("mixtral", "sdpa"), ("lfm2", "sdpa"), ("mamba2", None)],
)
def test_architectures(model_type, attention):
    model = tiny_model(model_type, attn_implementation=attention)
    install(model)
    assert_traced(model)


def test_copies_and_pickles():
    model = make_model()
    install(model)
    assert_traced(copy.deepcopy(model))
    assert_traced(pickle.loads(pickle.dumps(model)))


def test_padded_calls_left_aside():
    model = padding_free(make_model())
    assert_traced(model, [WAYS["export"], WAYS["strict export"]])
    with FlatModel.of(model).padded.aside():
        assert_traced(model)
    FlatModel.of(model).padded.remove()
    assert_traced(model)


def test_compiled_models_compute_padded_calls_flat():
    model = make_model().train()
    is_padding = IDS == 10
    labels = IDS.masked_fill(is_padding, -100)
    inputs = {"input_ids": IDS, "attention_mask": MASK.masked_fill(is_padding, 0), "labels": labels}
    expected = model(**inputs)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(padding_free(model), backend="aot_eager")
    for _ in range(2):
        found = compiled(**inputs)
        torch.testing.assert_close(found.loss, expected.loss)
    found.loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert FlatModel.of(model).counts.real == 2 * 9
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="flat batches have another layout in each call"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
