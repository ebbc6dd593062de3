"""Contexts in which a model is tried, in training or evaluation mode. They leave it bit for bit as it was."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, count
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from .. import upstream
from ..model.architecture import decoder_of
from ..model.flat_model import FlatModel
from ..model.restored import attributes_set, buffers_restored, local_part, random_state_restored
from .kinds import kind_of
from .probe import Call, set_where, undisturbed

Modules: TypeAlias = Sequence[torch.nn.Module]
Output: TypeAlias = torch.Tensor | tuple  # of a layer

# Standard deviation of weights that are moved off zero: as after a few training steps
_MOVED = 0.02
# The most entries of gradients that are held at once
_ENTRIES = 2**30
# The most parameters of a model whose layers are all tried, on the CPU and on accelerators: larger ones take too long
_MOST = 2**25, 2**30
# Counter of passes that failed here, and how long to wait for other processes to fail, too
_FAILURES, _SECONDS = count(), 20.0


@contextmanager
def as_in_training(
    model: PreTrainedModel, call: Call | None = None, every_layer: bool | None = None
) -> Iterator[tuple[str, ...]]:
    """
    Training mode with gradients, but without dropout or compiled code. Adapters that start at zero are moved. Unless
    `every_layer` (the default for small models), only the first and the last layer of each kind run, and the context
    yields, in words, what it leaves out. Everything is restored afterwards.
    """
    if every_layer is None:  # only if that takes seconds
        every_layer = sum(p.numel() for p in model.parameters()) <= _MOST[model.device.type != "cpu"]
    roots = (model, call) if isinstance(call, torch.nn.Module) else (model,)
    modules = [*dict.fromkeys(module for root in roots for module in root.modules())]
    with (
        _resharded(modules),
        random_state_restored(model),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # hooks on compiled modules would not run
        call.no_sync() if isinstance(call, DistributedDataParallel) else nullcontext(),
        nullcontext(()) if every_layer else _one_layer_of_each_kind(model) as left_out,
        buffers_restored(modules),
        attributes_set([*((module, "training", True) for module in modules), *upstream.not_reentrant(modules)]),
        without_dropout(modules),
        moved_off_zero(modules),
    ):
        yield left_out


@contextmanager
def as_it_answers(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    """Evaluation mode without gradients or compiled code. Leaves nothing out; everything is restored afterwards."""
    with undisturbed(model), buffers_restored(model.modules()), torch.compiler.set_stance("force_eager"):
        yield ()


@contextmanager
def _resharded(modules: Modules) -> Iterator[None]:
    """FSDP2 may leave weights gathered after a pass. Within this context, parameters are each process's own shards."""
    with ExitStack() as after:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
                after.callback(module.reshard)
        yield


@contextmanager
def _one_layer_of_each_kind(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    """
    Within this context, only the first and the last layer of each kind run, so that a deep model takes no longer than a
    shallow one. Yields which others were left out, in words. If weights are sharded, all run, as engines expect.
    """
    skipped = []
    outputs: dict[str, Output] = {}
    left_out = []
    stacks = [(name, [*x]) for name, x in decoder_of(model).named_children() if isinstance(x, torch.nn.ModuleList)]
    with ExitStack() as hooks:
        for name, stack in () if is_sharded(model) else stacks:
            kinds, numbers = [kind_of(layer) for layer in stack], []
            for i, (layer, kind) in enumerate(zip(stack, kinds, strict=True)):
                if kind not in kinds[:i]:
                    keep = partial(outputs.__setitem__, kind)
                    hooks.enter_context(layer.register_forward_hook(lambda _, args, output, keep=keep: keep(output)))
                elif kind in kinds[i + 1 :] and stack.count(layer) == 1:
                    skipped.append((layer, "forward", partial(_passed_on, outputs, kind)))
                    numbers.append(str(i))
            if numbers:
                left_out.append(
                    f"in training mode, {len(numbers)} of {len(kinds)} `{name}` ({', '.join(numbers)}) were left "
                    "out, because they are built like the first and the last of their kind"
                )
        with attributes_set(skipped):
            yield tuple(left_out)


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether processes gather weights from each other in each pass."""
    # FSDP's parameters may be DTensors, and DeepSpeed's have the attribute `ds_id`
    engines = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    return engines or any(local_part(p) is not p or "ds_id" in vars(p) for p in model.parameters())


def _passed_on(outputs: dict[str, Output], kind: str, *args: torch.Tensor, **kwargs: torch.Tensor) -> Output:
    """Stands in for a layer's forward: returns its input, in the form that the first layer of its kind returned."""
    hidden, output = args[0] if args else kwargs["hidden_states"], outputs[kind]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def without_dropout(modules: Modules) -> AbstractContextManager[None]:
    """Turns off NEFTune's noise and dropout, of modules and of functions whose rate a module or configuration holds."""

    def is_rate(holder, name, value):
        drops = "drop" in name or (name == "p" and "Dropout" in type(holder).__name__)
        return (drops and isinstance(value, float) and value > 0) or (name == "neftune_noise_alpha" and bool(value))

    return set_where(modules, is_rate, lambda _: 0.0)


def _set_values(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Set values that are put back before anyone else sees them: an earlier pass may still need the weight."""
    with upstream.version_kept(weight):
        weight.copy_(values)


@contextmanager
def moved_off_zero(modules: Modules, frozen: bool = False) -> Iterator[None]:
    """
    Within this context, weights that are all zeros get small random values: adapters and image projectors that start at
    zero hide mistakes beneath them. With `frozen`, this includes weights that are not trained.
    """
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as after:
        after.callback(torch.clear_autocast_cache)  # which may then hold copies of the moved weights
        for parameter in dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)):
            weight = local_part(parameter.detach())
            is_taken = (frozen or parameter.requires_grad) and weight.is_floating_point()
            if is_taken and weight.numel() and not weight.any():
                after.callback(_set_values, weight, weight.clone())
                _set_values(weight, torch.randn(weight.shape, generator=generator) * _MOVED)
        torch.clear_autocast_cache()  # which may hold copies of the original weights
        yield


def compared_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters whose gradients are compared: those not sharded, smallest first, as many as fit."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and local_part(p) is p]
    trained.sort(key=lambda entry: entry[1].numel())
    totals = accumulate(p.numel() for _, p in trained)
    return {name: p for (name, p), total in zip(trained, totals, strict=True) if total <= _ENTRIES}


@contextmanager
def frozen_layers_tried(model: PreTrainedModel) -> Iterator[list[str]]:
    """
    Within this context, each frozen layer is differentiated separately when it is first called with an input that needs
    a gradient. The list collects the names of layers that pass none on: inference kernels lose it without an error.
    """
    lost: list[str] = []
    tried: set[str] = set()

    def differentiate(name, module, args, kwargs):
        hidden = args[0] if args else None
        # PEFT's parameter adapters compute a weight once and cache it for all calls: it must not be made in this one
        if name in tried or is_parametrized(module) or not torch.is_grad_enabled():
            return
        if not (torch.is_tensor(hidden) and hidden.requires_grad):
            return
        tried.add(name)
        # The hooks of a checkpoint around the layer would count these tensors as its own: identity hooks hide them
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            hidden = hidden.detach().requires_grad_()
            output = module.forward(hidden.clone(), *args[1:], **kwargs)
            outputs = [*output] if isinstance(output, tuple) else [output]
            outputs = [x for x in outputs if torch.is_tensor(x) and x.is_floating_point()]
            losses = [(x * torch.randn_like(x)).sum() for x in outputs if x.requires_grad]
            gradient = torch.autograd.grad(losses, hidden, allow_unused=True)[0] if losses else None
        if outputs and (gradient is None or not gradient.any()):
            lost.append(f"`{name}` ({type(module).__name__})")

    def is_zero(weight):  # as in blocks newly added to a model, so that no gradient flows through it
        is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
        return is_plain and weight.dtype.itemsize > 1 and not weight.any()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            # Quantized weights may be integer buffers. Floating-point buffers may be tables, which have no gradient
            quantized = [x for x in module.buffers(recurse=False) if not x.is_floating_point()]
            weights = [*module.parameters(recurse=False), *quantized]
            if not any(x.requires_grad for x in weights) and any(x.ndim > 1 and not is_zero(x) for x in weights):
                hooks.enter_context(module.register_forward_pre_hook(partial(differentiate, name), with_kwargs=True))
        yield lost


class OthersWaitError(ValueError):
    """An error while other processes wait for this one within a pass: it must end the run."""


def raise_if_others_wait(model: PreTrainedModel, error: Exception, exchanges: bool = True) -> None:
    """
    Raise the `error` of a pass if other processes compute slices of the same batch, which the pass `exchanges`, or wait
    for weights.
    """
    if exchanges:
        FlatModel.peers_of(model).failed(model, error)
    raise_if_weights_are_awaited(model, error)


def raise_if_weights_are_awaited(model: PreTrainedModel, error: Exception) -> None:
    """Raise the `error` of a pass if other processes may be waiting for this one's weights, and have not failed too."""
    if not is_sharded(model) or not dist.is_initialized():
        return
    # All that fail get here within seconds. No collective, which those that wait could not join
    store, key = upstream.process_store(), f"trl_paddingfree/failed/{next(_FAILURES)}"
    store.add(key, 1)
    end = time.monotonic() + _SECONDS
    # `wait` of a store would lock its one connection, which PyTorch's own threads need
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() >= end:
            raise OthersWaitError(f"{type(error).__name__}, on this process only: {error}") from error
        time.sleep(0.05)
