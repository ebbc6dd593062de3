"""Comparisons in which nothing is rounding: float64 wherever libraries insist on float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from transformers import PreTrainedModel

# float64, relative to the largest entry: most are off by 1e-13, but the factor of Llama 4's queries is in float32, and
# gradients cancel. A wrong layout shows in the first or second digit
TOLERANCE = 1e-6


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Within this context, what libraries compute in float32 whatever the dtype of a model, such as recurrences, is in
    float64: their gradients of decays are sums over all tokens that cancel to a thousandth of their parts."""
    in_double = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with in_double, mock.patch.multiple(torch, float32=torch.float64, float=torch.float64):
        yield


def in_float64(model):
    """`model` with weights, and experts, that PyTorch multiplies in float64."""
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            each.set_experts_implementation("eager")
    return model.double()
