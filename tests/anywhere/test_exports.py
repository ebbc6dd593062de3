"""Models whose padded calls are computed flat are exported as transformers made them, and compile in pieces."""

import pytest
import torch

from tests.core.model.test_exports import ALL, IDS, IS_HASHED, MASK, WAYS, assert_traced
from tests.helpers.tiny import make_model
from tests.runs import TOLERANCE
from trl_paddingfree import FlatModel, padding_free


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def test_padded_calls_left_aside():
    model = padding_free(make_model())
    assert_traced(model, [WAYS["export"], WAYS["strict export"]] if IS_HASHED else ALL)
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


def test_a_compiled_model_is_taken_out_of_its_wrapper(caplog):
    model = make_model().train()
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
    expected = model(**inputs).loss
    compiled = torch.compile(model, backend="eager")
    assert padding_free(compiled) is model
    assert caplog.text.count("taken out of the wrapper of `torch.compile`") == 1
    for each in (model, compiled):
        torch.testing.assert_close(each(**inputs).loss, expected, rtol=TOLERANCE, atol=0.0)
    assert FlatModel.of(model).counts.real == 2 * 7
