"""Padded calls that are computed flat wait for the device once, to read their rows, and answer as on the CPU."""

import copy

import pytest
import torch

from tests.anywhere.test_calls import rows, unlabelled
from tests.helpers.architectures import tiny_model
from tests.pretend_device import counted_waits, without
from trl_paddingfree import padding_free

# float32, on the same CPU
TOLERANCE = 1e-5


def called(model, inputs):
    """What a call makes the host wait for in this package, forward and backward, and the logits."""
    with counted_waits() as waits:
        output = model(**inputs)
        output.logits.float().pow(2).mean().backward() if output.loss is None else output.loss.backward()
    return {wait: number for wait, number in waits.items() if wait.file.startswith("trl_paddingfree/")}, output.logits


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt", "mixtral", "qwen3_next"])
def test_a_call_waits_once_and_not_for_rows_of_the_host(name, device):
    on_host = padding_free(tiny_model(name, use_cache=False))
    model = copy.deepcopy(on_host).to(device)
    given = unlabelled()
    mask = given["attention_mask"]
    for inputs in (
        given,
        rows("right"),
        {**given, "position_ids": mask.cumsum(1) - mask},
        {"input_ids": given["input_ids"] + 2},
    ):
        expected = on_host(**inputs).logits
        waits, logits = called(model, {key: x.to(device) for key, x in inputs.items()})
        assert [(wait.function, number) for wait, number in waits.items()] == [("_on_host", 1)]
        assert torch.allclose(logits.cpu(), expected, atol=TOLERANCE * expected.abs().max().item())


def test_a_loss_that_reads_padding_is_told_by_the_next_call_without_a_wait(device):
    model = padding_free(tiny_model("llama", use_cache=False)).to(device)
    given = {key: x.to(device) for key, x in unlabelled().items()}
    logits = model(**given).logits
    with counted_waits() as waits:
        logits[:, :-1].logsumexp(-1).mean().backward()
    assert not [wait for wait in waits if wait.file.startswith("trl_paddingfree/")]
    with pytest.raises(ValueError, match="The loss reads what the model answers at padding"):
        model(**given)
    model(**given)  # it is told once of each loss


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_device_without_float64_is_proven(name, device):
    with without(torch.float64):
        called(
            padding_free(tiny_model(name, use_cache=False).to(device)),
            {x: y.to(device) for x, y in rows("right").items()},
        )
