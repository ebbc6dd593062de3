"""Models that come from `torch.compile` train as TRL trains them, taken out of the wrapper."""

import pytest
import torch
from peft import get_peft_model

from tests.helpers.tiny import arguments, lora
from tests.runs import assert_same, run

SAID = "taken out of the wrapper of `torch.compile`"
# All linear layers are not found under the wrapper, but for the head, which TRL refuses
ADAPTERS = {"target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def named(run):
    """The same run, with weights by the names that they have without the wrapper."""
    run.weights = {name.replace("_orig_mod.", ""): x for name, x in run.weights.items()}
    return run


def made(task, backend, wrap):
    given = arguments(task, adapters=False)
    torch.manual_seed(0)
    given["model"] = wrap(given["model"], lambda model: torch.compile(model, backend=backend))
    return given


@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, compiled: compiled(model),
        lambda model, compiled: get_peft_model(compiled(model), lora(**ADAPTERS)),
    ],
    ids=["alone", "within adapters"],
)
@pytest.mark.drawn(3)
def test_trainers(task, backend, wrap, caplog):
    padded = named(run(task, "padded", steps=2, **made(task, backend, wrap)))
    ours = run(task, "shared", steps=2, **made(task, backend, wrap))
    assert_same(padded, ours)
    assert caplog.text.count(SAID) == 1
    assert not any("_orig_mod" in name for name in ours.weights)


def test_compiled_adapters_train_as_uncompiled_ones():
    """TRL finds no backbone in such a model."""
    wraps = [
        lambda model, compiled: get_peft_model(model, lora()),
        lambda model, compiled: compiled(get_peft_model(model, lora())),
    ]
    ours = [run("sft", "shared", steps=2, **made("sft", "eager", wrap)) for wrap in wraps]
    assert_same(*ours)
