"""What is trained on the pretend device, and the comparison with the CPU."""

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import pretend_device
from tests.runs import off_by, run

# The device computes on the CPU, by other calls in places: sums of a few hundred terms in float32 differ by less
TOLERANCE = 1e-5
# Which of two equal rewards is higher is rounding
ROUNDED = ("rewards/accuracies", "accuracy")


def train(task, layout="shared", make=dict, **options):
    """Train two steps, with adapters if nothing else is asked for, on data that the data loader pins."""
    options = {
        "dataloader_pin_memory": True,
        "steps": 2,
        **({"beta": 0.0} if task in ("grpo", "rloo") else {}),
        **options,
    }
    return run(task, layout, **make(), **options)


def assert_as_on_cpu(train, tolerance=TOLERANCE):
    """Train on the CPU and on the device, compare every logged figure and all weights, and give the latter."""
    with pretend_device.switched_off(), sdpa_kernel(SDPBackend.MATH):  # the device has no other
        expected = train()
    actual = train()
    for each, device in ((expected, torch.device("cpu")), (actual, pretend_device.DEVICE)):
        assert {each.trainer.model.device, *(weight.device for weight in each.weights.values())} == {device}
    on_cpu = replace(actual, weights={name: weight.cpu() for name, weight in actual.weights.items()}, gradients=[])
    off = off_by(replace(expected, gradients=[]), on_cpu, tolerance, ROUNDED)
    assert not off, off
    return actual
