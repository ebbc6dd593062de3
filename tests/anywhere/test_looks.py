"""`padding_free(model, check_steps=...)`: training calls are compared with their rows one by one."""

import copy

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, LlamaConfig

from tests.helpers.folders import needs
from tests.helpers.tiny import SIZES, lora, make_model
from tests.runs import TOLERANCE
from trl_paddingfree import FlatModel, UnprovenModelError, padding_free

pytestmark = needs("proof")


def rows(seed=0, left=False, lengths=(20, 9, 14, 3)):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (len(lengths), max(lengths)), generator=generator)
    ids[2, :6] = ids[0, :6]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = ids * mask
    return (
        {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
        if left
        else {"input_ids": ids, "attention_mask": mask}
    )


def steps(model, number, **given):
    """A loop of training calls; the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(number):
        inputs = rows(step, **given)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"].cumsum(1) < 2, -100)
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def found(model):
    return FlatModel.of(model).padded.looks.found


def test_a_loss_of_two_calls_trains_adapters_that_start_at_zero():
    """A look moves them for a while, which the graph of the call before must not take for a change."""
    gradients = []
    for every in (0, 1):
        model = padding_free(get_peft_model(make_model(), lora(init_lora_weights=True)).train(), check_steps=every)
        sum(model(**rows(seed)).logits[rows(seed)["attention_mask"].bool()].pow(2).sum() for seed in (0, 1)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.3}], ids=str)
def test_looks_leave_no_trace(left, options):
    runs = []
    for every in (0, 1):
        model = padding_free(make_model(**options).train(), check_steps=every)
        torch.manual_seed(0)
        runs.append((steps(model, 3, left=left), model))
    (without, one), (looked, other) = runs
    assert without == looked
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert FlatModel.of(one).padded.looks is None
    assert FlatModel.of(one).counts == FlatModel.of(other).counts
    assert (found(other).number, found(other).rows, found(other).not_compared) == (3, 12, [])
    assert 0 < found(other).largest_error < TOLERANCE


def test_the_first_call_and_every_so_many_are_looked_at_but_none_without_gradients():
    model = padding_free(make_model().train(), check_steps=2)
    with torch.no_grad():
        model(**rows())
    model.eval()(**rows(), use_cache=False)
    steps(model.train(), 5)
    assert found(model).number == 3
    assert found(padding_free(make_model())).number == 0
    assert FlatModel.of(padding_free(make_model(), check=False)).padded.looks is None


def test_a_mistake_ends_every_later_training_call():
    """A loop that skips what fails does not train on what was proven wrong."""
    model = padding_free(make_model().train(), check_steps=250)
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + (forward(x).roll(1, 1) if x.size(0) == 1 and x.size(1) > 21 else 0)
    for _ in range(2):
        with pytest.raises(UnprovenModelError, match="training call 1, of"):
            steps(model, 1)


@pytest.mark.parametrize("kind", ["logits", "labels", "tuple", "classes", "positions"])
def test_a_mistake_ends_training_before_anything_is_learnt(kind):
    if kind == "classes":
        model = AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES, num_labels=3))
    else:
        model = make_model()
    model = padding_free(model.train(), check_steps=1)
    inputs = rows()
    inputs |= (
        {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)} if kind == "labels" else {}
    )
    inputs |= {"return_dict": False} if kind == "tuple" else {}
    inputs |= {"position_ids": torch.arange(20)[None]} if kind == "positions" else {}
    model(**inputs)
    assert found(model).largest_error < TOLERANCE
    assert found(model).number == 1
    mlp = model.base_model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 1e-2 * (x.size(0) == 1 and x.size(1) > 30) * x.roll(1, 1)
    with pytest.raises(UnprovenModelError, match="training call 2, of 4 rows and 46 tokens.*Leave the call") as error:
        model(**inputs)
    assert "gradient" in str(error.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_copies_look_for_themselves():
    model = padding_free(make_model().train(), check_steps=1)
    steps(model, 1)
    other = copy.deepcopy(model)
    steps(other, 2)
    assert (found(model).number, found(other).number) == (1, 3)


@pytest.mark.parametrize("value", [-1, True, 0.5, "10"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=f"`check_steps={value!r}`"):
        padding_free(make_model(), check_steps=value)
