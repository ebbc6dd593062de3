"""A model as training will have it, for a moment, and afterwards bit for bit as it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from .. import upstream
from ..model.restored import modes_restored, random_state_restored
from ..model.saved_bytes import local_part

# Spread of weights that are moved off zero: as after some steps of training
_MOVED = 0.02
# Parameters of at most this many entries are small: norms, biases, routers, adapters
_SMALL = 2**18


def _parts(model: PreTrainedModel, call: Callable[..., Any] | None) -> list[torch.nn.Module]:
    """Every module of a model and of its wrapper."""
    roots = [model, *([call] if isinstance(call, torch.nn.Module) else [])]
    return [*{id(module): module for root in roots for module in root.modules()}.values()]


@contextmanager
def as_in_training(model: PreTrainedModel, call: Callable[..., Any] | None = None) -> Iterator[None]:
    """
    Training mode with gradients, without dropout, adapters moved off zero, all compiled code run as it is written.

    Afterwards training modes, weights, buffers and the random state are as before.
    """
    modules = _parts(model, call)
    with ExitStack() as stack:
        stack.enter_context(random_state_restored(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(upstream.rotary_state_restored(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks on compiled modules would not run
        if isinstance(call, DistributedDataParallel):
            stack.enter_context(call.no_sync())
        for restored in (_buffers_restored, _in_training_mode, _without_dropout, moved_off_zero):
            stack.enter_context(restored(modules))
        yield


@contextmanager
def _in_training_mode(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    with modes_restored(modules):
        for module in modules:
            module.training = True
        yield


@contextmanager
def _without_dropout(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Dropout of modules, and of functions whose probability stands in a module or a configuration."""
    configs = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    configs += [config.get_text_config() for config in configs]
    rates: list[tuple[Any, str]] = [(module, "p") for module in modules if "Dropout" in type(module).__name__]
    holders = {id(holder): holder for holder in (*modules, *configs)}.values()
    rates += [(holder, name) for holder in holders for name in vars(holder) if "drop" in name]
    values = [(holder, name, vars(holder).get(name)) for holder, name in rates]
    values = [entry for entry in values if isinstance(entry[2], float) and entry[2] > 0]
    for holder, name, _ in values:
        vars(holder)[name] = 0.0
    try:
        yield
    finally:
        for holder, name, value in values:
            vars(holder)[name] = value


@contextmanager
def _buffers_restored(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Some layers count in buffers while they train."""
    buffers = [(module, name, x) for module in modules for name, x in module.named_buffers(recurse=False)]
    kept = [buffer.clone() for _, _, buffer in buffers]
    try:
        yield
    finally:
        for (module, name, buffer), before in zip(buffers, kept, strict=True):
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            setattr(module, name, buffer)


@contextmanager
def moved_off_zero(modules: Sequence[torch.nn.Module], frozen: bool = False) -> Iterator[None]:
    """
    Weights of adapters, and of projectors of images, that start at zero hide what the adapter or projector does.

    Full training moves weights that are zero, too: what starts at zero is small either way.

    Args:
        modules (`Sequence[torch.nn.Module]`):
            The modules whose own weights to look at.
        frozen (`bool`, *optional*, defaults to `False`):
            Whether to move weights that are not trained, too: a reference starts as the model that is.
    """
    generator, zeros = torch.Generator().manual_seed(0), []
    for parameter in dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)):
        weight = local_part(parameter.detach())
        is_taken = (frozen or parameter.requires_grad) and weight.is_floating_point()
        if is_taken and weight.numel() and not weight.any():
            zeros.append((weight, weight.clone()))
            weight.copy_(torch.randn(weight.shape, generator=generator) * _MOVED)
    try:
        yield
    finally:
        for weight, before in zeros:
            weight.copy_(before)


def small_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Trainable parameters of which a second gradient fits beside everything else: norms, routers, adapters."""
    return [p for p in model.parameters() if p.requires_grad and 0 < p.numel() <= _SMALL]


class WatchedEmbeddings:
    """Within this context, `output` is what the input embeddings of a model gave last, and takes a gradient."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.output: torch.Tensor | None = None

    def __enter__(self) -> "WatchedEmbeddings":
        embeddings: Any = self.model.get_input_embeddings()
        self.handle = embeddings.register_forward_hook(self._watch)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

    def _watch(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.output = output if output.requires_grad else output.requires_grad_()
        return self.output


def gradients(
    loss: torch.Tensor, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """
    Gradients of `loss` with respect to `inputs`, `None` where it does not depend on one. No `.grad` changes.

    Args:
        loss (`torch.Tensor` of shape `()`):
            What to differentiate.
        inputs (`Sequence[torch.Tensor]`):
            With respect to what.
        parameters (`Sequence[torch.nn.Parameter]`):
            All parameters that a backward pass gives gradients to.
    """
    try:
        return list(torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # Reentrant checkpointing runs whole backward passes only: each gradient is dropped as soon as it is there
    wanted, kept = {id(x) for x in inputs}, [(p, p.grad) for p in parameters]
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        for p in parameters
        if id(p) not in wanted and p.requires_grad
    ]
    for tensor in inputs:
        tensor.retain_grad()
    for parameter in parameters:
        parameter.grad = None
    try:
        loss.backward()
        return [x.grad for x in inputs]
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in kept:
            parameter.grad = gradient
