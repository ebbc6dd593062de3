"""Allocations that fail on purpose."""

from contextlib import contextmanager

import torch


@contextmanager
def failing(trainer, attempts, in_backward):
    """Within this context, an allocation fails in the first layer, in forward passes `attempts` or their backward."""
    layer, passes = trainer.flat.memory.layers[0], iter(range(1000))

    def fail(*_):
        raise torch.OutOfMemoryError("no memory, on purpose")

    def watch(module, args, output):
        if torch.is_grad_enabled() and next(passes) in attempts:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(fail) if in_backward else fail()

    handle = layer.register_forward_hook(watch)
    yield
    handle.remove()
