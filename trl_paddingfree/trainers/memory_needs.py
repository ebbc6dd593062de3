"""How much memory training needs: weights, gradients, the optimizer, and what each micro-batch keeps and works with."""

import inspect
import os
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch

from .. import upstream
from ..batching.budget import MemoryNeeds
from ..model.forward import is_pooled
from ..model.recompute import LOADS, KeptBytes, count_kept_bytes, recomputable_layers
from ..model.routes import Route
from ..model.saved_bytes import local_part
from .memory_budget import GIB, MemoryBudget, is_sharded
from .proving import in_precision

# What `"auto"` leaves to CUDA's context, to kernels that need room of their own, and to fragmentation
MARGIN = 0.1
# How many tensors of the size of its largest the backward pass of a layer has at a time: gradients of the inputs and
# of the output of one product
WORKING_TENSORS = 3
# Bytes per logit besides the logits: without Triton, TRL makes a tile into its gradient by seven more tensors at a
# time, in float32 whatever the model's dtype, and a mask
TORCH_TILE = 7 * 4 + 1


def plan_memory(trainer: Any, route: Route) -> MemoryBudget:
    """
    The plan of a trainer under its `memory_budget`.

    Args:
        trainer ([`~trl_paddingfree.trainers.base.FlatTrainer`]):
            The trainer, whose models have their weights.
        route ([`~trl_paddingfree.model.routes.Route`]):
            How its models compute flat batches.

    Raises:
        `ValueError`: If the model has no layers that can recompute, or the memory of the device is not known.
    """
    accelerator, base, options = trainer.accelerator, trainer.flat_base(trainer.model), trainer.flat.options
    images = trainer.images_in_memory()
    layers = recomputable_layers(base, bool(images))
    if not layers:
        raise ValueError(
            f"`memory_budget={options.memory_budget}`: {type(base).__name__} has no layers that can recompute their "
            "activations. Leave `memory_budget` out and set `max_tokens_per_micro_batch`."
        )
    # Wrappers that gather weights have to be called; that of DDP waits for a backward pass
    call = trainer.model_wrapped if is_sharded(accelerator) else None
    with in_precision(accelerator):
        router = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
        kept = count_kept_bytes(base, route, call, accelerator.device, images, **router)
    if images:  # a tower that nothing trains keeps nothing
        working = [i for i, bytes_kept in enumerate(kept.kept.sum(1)) if bytes_kept]
        layers, kept = [layers[i] for i in working], kept.of(working)
    if trainer.optimizer is None:
        optimizer, arguments = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    else:
        own = trainer.optimizer
        while hasattr(own, "optimizer"):  # without the wrappers of accelerate and of DeepSpeed
            own = own.optimizer
        # Defaults hold more than can be given: AdamW's have what tells it from Adam
        taken = inspect.signature(type(own)).parameters
        optimizer, arguments = type(own), {name: value for name, value in own.defaults.items() if name in taken}
    needs = needs_of(kept, fixed_bytes(trainer.flat_models(), (optimizer, arguments)), base)
    budget = budget_bytes(options.memory_budget, accelerator.device)
    plan = MemoryBudget(options.memory_budget, budget, needs, layers, route, options.max_tokens_per_micro_batch)
    base.register_forward_pre_hook(plan.apply)
    return plan


def budget_bytes(option: float | str, device: torch.device) -> int:
    """
    The bytes that `memory_budget` stands for.

    Args:
        option (`float` or `"auto"`):
            GiB, or what the device has less a margin.
        device (`torch.device`):
            The device that trains. The memory of the CPU is divided among the processes of this machine.

    Raises:
        `ValueError`: If the memory of the device is not known.
    """
    if option != "auto":
        return int(float(option) * GIB)
    if device.type == "cuda":
        return int((1 - MARGIN) * torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu":
        own = psutil.Process().memory_info().rss  # the weights are there already, and count against the budget
        return int(
            (1 - MARGIN) * (psutil.virtual_memory().available + own) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        )
    raise ValueError(f"`memory_budget='auto'` knows the memory of CUDA devices and of the CPU, not of {device.type}.")


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct storages on this device: of a sharded tensor its own part."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        own = local_part(tensor)
        own = getattr(own, "ds_tensor", own)  # ZeRO-3
        storages[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
    return sum(storages.values())


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a model, with the scales of 4-bit weights."""
    found = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        if (quantized := getattr(parameter, "quant_state", None)) is not None:
            found += [x for x in quantized.as_dict().values() if isinstance(x, torch.Tensor)]
    return found


def optimizer_bytes(optimizer: type, options: dict[str, Any], parameters: Sequence[torch.Tensor]) -> int:
    """
    Bytes of the state that an optimizer will have: that of a small parameter, in proportion.

    Args:
        optimizer (`type`), options (`dict[str, Any]`):
            Its class and its arguments.
        parameters (`Sequence[torch.Tensor]`):
            What it trains.
    """
    total = 0.0
    for dtype in {parameter.dtype for parameter in parameters}:
        alike = [parameter for parameter in parameters if parameter.dtype == dtype]
        sample = torch.nn.Parameter(torch.zeros(128, 128, dtype=dtype, device=alike[0].device))
        sample.grad = torch.zeros_like(sample)
        try:
            made = optimizer([sample], **options)
            made.step()
            state = [x for x in made.state[sample].values() if isinstance(x, torch.Tensor)]
            # Paged state gives way to everything else
            per_byte = tensor_bytes(x for x in state if not getattr(x, "is_paged", False)) / tensor_bytes([sample])
        except Exception:  # optimizers of their own kind, which want a whole model: as Adam, which has most
            per_byte = 2.0
        total += per_byte * tensor_bytes(alike)
    return round(total)


def needs_of(kept: KeptBytes, fixed: int, model: Any) -> MemoryNeeds:
    """
    What micro-batches need, from what layers keep.

    Args:
        kept ([`~trl_paddingfree.model.recompute.KeptBytes`]):
            What was counted.
        fixed (`int`):
            Bytes that do not depend on the micro-batch.
        model ([`~transformers.PreTrainedModel`]):
            The model: TRL's fused LM head works in tiles, and adds gradients up in float32. A pooled head, with one
            value per row, needs nothing to speak of.
    """
    summed, tile = [0.0] * len(LOADS), (0, 0)
    if not is_pooled(model):
        head = model.get_output_embeddings().weight
        summed[LOADS.index("scored")] = 4 * model.config.get_text_config().hidden_size
        summed[LOADS.index("constant")] = 4 * head.numel() * head.requires_grad
        rows, columns = upstream.lm_head_tile()
        # TRL computes in the dtype of autocast, which is not wider than this
        per_row = columns * model.dtype.itemsize
        if head.device.type != "cuda":
            per_row += TORCH_TILE * min(columns, model.config.get_text_config().vocab_size)
        tile = per_row, rows
    working = WORKING_TENSORS * kept.largest.max(0)
    return MemoryNeeds(fixed, kept.kept, kept.recomputed, kept.outside, summed, tile, working)


def fixed_bytes(models: Sequence[Any], optimizer: tuple[type, dict[str, Any]]) -> int:
    """Weights of all models, and gradients and optimizer state of what is trained of the first."""
    trained = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
    return (
        tensor_bytes(tensor for model in models for tensor in weights(model))
        + tensor_bytes(trained)
        + optimizer_bytes(*optimizer, trained)
    )
