"""Contexts in which a model is tried, in training or in evaluation mode. Afterwards it is bit for bit as it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from .. import upstream
from ..model.flat_model import FlatModel
from ..model.restored import attributes_set, buffers_restored, local_part, random_state_restored
from .probe import Call, set_where, undisturbed

Output: TypeAlias = torch.Tensor | tuple  # of a layer

# Standard deviation of weights that are moved off zero: as after some steps of training
_MOVED = 0.02
# The most entries of a small parameter
_SMALL = 2**18


@contextmanager
def as_in_training(model: PreTrainedModel, call: Call | None = None, every_layer: bool = False) -> Iterator[None]:
    """
    Training mode with gradients, but without dropout and compiled code. Adapters that start at zero are moved, and of
    layers of one kind only the first and the last compute, unless `every_layer`. Afterwards all is as before.
    """
    roots = (model, call) if isinstance(call, torch.nn.Module) else (model,)
    modules = [*dict.fromkeys(module for root in roots for module in root.modules())]
    with (
        _resharded(modules),
        random_state_restored(model),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # hooks on compiled modules would not run
        call.no_sync() if isinstance(call, DistributedDataParallel) else nullcontext(),
        nullcontext() if every_layer else one_layer_of_each_kind(model),
        buffers_restored(modules),
        attributes_set((module, "training", True) for module in modules),
        attributes_set(upstream.not_reentrant(modules)),
        without_dropout(modules),
        moved_off_zero(modules),
    ):
        yield


@contextmanager
def as_it_answers(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards all is as before."""
    with undisturbed(model), buffers_restored(model.modules()):
        yield


@contextmanager
def _resharded(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """FSDP2 may leave weights gathered after a pass. Within this context, parameters are each process's own parts."""
    with ExitStack() as after:
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
                after.callback(module.reshard)
        yield


def _kind(layer: torch.nn.Module) -> str:
    """Equal for layers that compute alike, but for the values of their weights: their settings, shapes and dtypes."""
    settings = [
        (type(part), name, attribute, value)
        for name, part in layer.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and attribute not in ("layer_idx", "training")
    ]
    weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return f"{sorted(map(repr, settings))} {weights}"


@contextmanager
def one_layer_of_each_kind(model: PreTrainedModel) -> Iterator[None]:
    """
    Within this context, only the first and the last layer of each kind compute: a mistake shows in any layer of a kind,
    and a deep model takes no longer than a shallow one. If weights are sharded, all layers compute, as engines expect.
    """
    skipped: list[tuple[torch.nn.Module, str, Callable]] = []
    outputs: dict[str, Output] = {}
    # Parameters of FSDP may be DTensors, and those of DeepSpeed have this attribute
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    is_sharded |= any(local_part(p) is not p or "ds_id" in vars(p) for p in model.parameters())
    stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
    with ExitStack() as hooks:
        for stack in () if is_sharded else stacks:
            kinds = [_kind(layer) for layer in stack]
            for i, (layer, kind) in enumerate(zip(stack, kinds, strict=True)):
                if kind not in kinds[:i]:
                    keep = partial(outputs.__setitem__, kind)
                    hooks.enter_context(layer.register_forward_hook(lambda _, args, output, keep=keep: keep(output)))
                elif kind in kinds[i + 1 :]:
                    skipped.append((layer, "forward", partial(_passed_on, outputs, kind)))
        with attributes_set(skipped):
            yield


def _passed_on(outputs: dict[str, Output], kind: str, *args: torch.Tensor, **kwargs: torch.Tensor) -> Output:
    """Stands in for a layer's forward: returns its input, as what the first layer of its kind returned."""
    hidden, output = args[0] if args else kwargs["hidden_states"], outputs[kind]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def without_dropout(modules: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Dropout is off, of modules and of functions whose rate a module or a configuration holds, and so is noise."""

    def is_rate(holder: object, name: str, value: object) -> bool:
        drops = "drop" in name or (name == "p" and "Dropout" in type(holder).__name__)
        return (drops and isinstance(value, float) and value > 0) or (name == "neftune_noise_alpha" and bool(value))

    return set_where(modules, is_rate, 0.0)


@contextmanager
def moved_off_zero(modules: Sequence[torch.nn.Module], frozen: bool = False) -> Iterator[None]:
    """
    Within this context, weights that are all zeros get small random values: adapters and projectors of images that
    start at zero hide mistakes beneath them. `frozen` moves weights that are not trained, too.
    """
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as after:
        after.callback(torch.clear_autocast_cache)  # which may then hold copies of the moved weights
        for parameter in dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)):
            weight = local_part(parameter.detach())
            is_taken = (frozen or parameter.requires_grad) and weight.is_floating_point()
            if is_taken and weight.numel() and not weight.any():
                after.callback(weight.copy_, weight.clone())
                weight.copy_(torch.randn(weight.shape, generator=generator) * _MOVED)
        torch.clear_autocast_cache()  # which may hold copies of the weights before
        yield


def small_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Trainable parameters small enough to hold a second gradient of each: norms, biases, routers, adapters."""
    return [p for p in model.parameters() if p.requires_grad and 0 < p.numel() <= _SMALL]


@contextmanager
def watched_embeddings(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within this context, the list gets each output of the model's input embeddings, to take its gradient."""
    outputs: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        outputs.append(output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_())
        return output.clone()  # some models (GIT) write into it in place, which a leaf forbids

    with model.get_input_embeddings().register_forward_hook(watch):
        yield outputs


@contextmanager
def frozen_layers_tried(model: PreTrainedModel) -> Iterator[list[str]]:
    """
    Within this context, each frozen layer is differentiated by itself when it is first called with an input that needs
    a gradient. The list gets the names of layers that pass none on: kernels for inference lose it without an error.
    """
    lost: list[str] = []
    tried: set[str] = set()

    def differentiate(name: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        states = args[0] if args else None
        if name in tried or not (torch.is_grad_enabled() and torch.is_tensor(states) and states.requires_grad):
            return
        tried.add(name)
        # Hooks of a checkpoint around the layer would count these tensors as its own: these hooks hide them
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            states = states.detach().requires_grad_()
            output = module.forward(states.clone(), *args[1:], **kwargs)
            outputs = [*output] if isinstance(output, tuple) else [output]
            outputs = [x for x in outputs if torch.is_tensor(x) and x.is_floating_point()]
            losses = [(x * torch.randn_like(x)).sum() for x in outputs if x.requires_grad]
            gradient = torch.autograd.grad(losses, states, allow_unused=True)[0] if losses else None
        if outputs and (gradient is None or not gradient.any()):
            lost.append(f"`{name}` ({type(module).__name__})")

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            # Quantized weights may be buffers, of integers. Buffers in floating point may be tables, without gradient
            quantized = [x for x in module.buffers(recurse=False) if not x.is_floating_point()]
            weights = [*module.parameters(recurse=False), *quantized]
            if not any(x.requires_grad for x in weights) and any(x.ndim > 1 and not _is_zero(x) for x in weights):
                hook = partial(differentiate, name)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield lost


def _is_zero(weight: torch.Tensor) -> bool:
    """Whether a weight is all zeros, as in blocks that were added to a model, so that no gradient comes through it."""
    is_plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
    return is_plain and weight.dtype.itemsize > 1 and not weight.any()


def refuse_broken_slices(model: PreTrainedModel, error: Exception) -> None:
    """If the model computes slices with other processes, raise its `error`: they may wait for this process."""
    if (group := FlatModel.group_of(model)) is not None:
        raise ValueError(
            f"`sequence_parallel_size={group.size}` cannot serve {type(model).__name__}, which raises "
            f"{type(error).__name__} in slices: {error} Set it to 1 to train whole batches."
        ) from error
