"""A model is exported and compiled whole as transformers made it: after training, and outside of calls of ours."""

import copy
import pickle

import pytest
import torch
from packaging.version import Version

from tests.helpers.architectures import tiny_model
from tests.helpers.flat_and_padded import install
from tests.helpers.folders import STATES
from tests.helpers.tiny import ADAPTERS, arguments, make_model
from tests.runs import TOLERANCE, run
from trl_paddingfree import FlatModel

IDS = torch.tensor([[3, 4, 5, 6, 9], [3, 4, 7, 8, 10]])
MASK = torch.ones_like(IDS)
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}
# Before, dynamo cannot hash the name by which a model finds our attention, and says so
IS_HASHED = Version(torch.__version__) >= Version("2.13")
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


ALL = (*WAYS.values(), in_place) if IS_HASHED else (WAYS["export"],)


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
    [
        ("gemma2", "eager"),
        ("gpt_oss", "eager"),
        ("mixtral", "sdpa"),
        pytest.param("lfm2", "sdpa", marks=STATES),
        pytest.param("mamba2", None, marks=STATES),
    ],
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
