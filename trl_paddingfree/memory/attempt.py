"""A pass in which memory may run out, and how to take it back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ..model.restored import gradients_dropped


class Attempt:
    """
    What a forward and backward pass changes, as it was before: gradients of `parameters`, the random state of the CPU
    and of `device`, and what `put_back` puts back.

    No gradient is copied. One that the pass has added to is whole, because each parameter is added to once; it is kept,
    and what a repeated pass computes for it is dropped.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device, put_back: Callable[[], None]):
        # PyTorch counts the changes of each tensor
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in parameters]
        self.put_back, self.device = put_back, device
        self.random = torch.get_rng_state()
        self.on_device = None if device.type == "cpu" else torch.get_device_module(device)
        self.device_random = None if self.on_device is None else self.on_device.get_rng_state(device)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within this context, what failed is computed again; afterwards every gradient counts once."""
        added = [(p, p.grad) for p, version in self.versions if p.grad is not None and p.grad._version != version]
        self.put_back()
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            self.on_device.set_rng_state(self.device_random, self.device)
            torch.accelerator.empty_cache()
        for parameter, _ in added:
            parameter.grad = None
        with gradients_dropped(parameter for parameter, _ in added):  # a second one might find no room
            yield
        for parameter, gradient in added:
            parameter.grad = gradient
