"""A forward and backward pass that can be taken back when memory runs out in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Attempt:
    """
    What a forward and backward pass changes, as it was before: gradients, metrics, the random state, and what the
    trainer names in `changed_by_loss`.

    Nothing is copied. A gradient that the pass has added to is whole, because each parameter is added to once; it is
    kept, and what a repeated pass computes for it is dropped.

    Args:
        trainer ([`~trl.trainer.base_trainer._BaseTrainer`]):
            The trainer.
        sums (`dict`, *optional*):
            Sums of metrics beside the trainer's own.
    """

    def __init__(self, trainer: Any, sums: dict | None = None):
        self.trainer, self.sums, self.sums_before = trainer, sums, {k: v.copy() for k, v in (sums or {}).items()}
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        # PyTorch counts the changes of each tensor
        self.versions = [(p, None if p.grad is None else p.grad._version) for p in trained]
        self.metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self.tokens, self.counted = trainer._total_train_tokens, trainer.counts.new
        self.state = {name: getattr(trainer, name) for name in trainer.changed_by_loss}
        self.random = torch.get_rng_state()
        self.device = trainer.accelerator.device
        self.on_device: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self.device_random = None if self.on_device is None else self.on_device.get_rng_state(self.device)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within this context, what failed is computed again; afterwards every gradient counts once."""
        added = [(p, p.grad) for p, version in self.versions if p.grad is not None and p.grad._version != version]
        self.trainer._metrics["train"].clear()
        self.trainer._metrics["train"].update(self.metrics)
        self.trainer._total_train_tokens, self.trainer.counts.new = self.tokens, self.counted
        vars(self.trainer).update(self.state)
        if self.sums is not None:
            self.sums.clear()
            self.sums.update(self.sums_before)
        torch.set_rng_state(self.random)
        if self.on_device is not None:
            self.on_device.set_rng_state(self.device_random, self.device)
            torch.accelerator.empty_cache()
        for parameter, _ in added:
            parameter.grad = None
        yield
        for parameter, gradient in added:
            parameter.grad = gradient
