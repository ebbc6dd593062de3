"""Makes the planner of a run: counts activations, and adds up weights, gradients and optimizer state."""

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..flat.batch import Inputs
from ..model.architecture import recomputable_layers
from ..model.flat_model import FlatModel
from .device import PeakMemory, budget_bytes
from .engine import is_sharded, zero_stage
from .kept_bytes import KeptBytes, count_kept_bytes
from .needs import HeadBytes, MemoryNeeds, fixed_bytes, tensor_bytes
from .planner import MemoryPlanner


def make_planner(
    flat_model: FlatModel,
    accelerator: Accelerator,
    device_memory: PeakMemory,
    *,
    option: float | str | None,
    limit: int | None,
    is_reentrant: bool,
    models: Sequence[torch.nn.Module],
    wrapped: torch.nn.Module,
    optimizer: torch.optim.Optimizer | tuple[type, dict[str, Any]],
    head: HeadBytes,
    images: Sequence[Inputs],
    arguments: Inputs,
) -> MemoryPlanner:
    """
    The planner of a run that trains `flat_model`, with `option` as `memory_budget` and a `limit` of tokens. All models
    must have their weights. With a budget, sets the layers of the model that may recompute, and refuses a model without
    any.

    `is_reentrant` says whether layers use reentrant checkpoints. `models` are all that hold weights, the trained one
    first; `wrapped` is that one in the wrapper of its engine. `optimizer` is the optimizer or, before there is one, its
    class and arguments. `head` is the head that the loss uses, `images` are arguments of calls with different numbers
    of images, and `arguments` what training passes to the model besides a batch.
    """
    planner = MemoryPlanner(
        flat_model, accelerator, device_memory, limit=limit, option=option, is_reentrant=is_reentrant
    )
    if option is None:
        return planner
    base = flat_model.model
    devices = {p.device for model in models for p in model.parameters() if p.device.type == accelerator.device.type}
    if len(devices) > 1:
        raise ValueError(
            f"`memory_budget={option}` counts the memory of one device, and `device_map` has spread the weights over "
            f"{len(devices)}. Leave it out, and set `max_tokens_per_micro_batch`."
        )
    layers = recomputable_layers(base, bool(images))
    if not layers:
        raise ValueError(
            f"`memory_budget={option}`: {type(base).__name__} has no layers that can recompute their "
            "activations. Leave `memory_budget` out and set `max_tokens_per_micro_batch`."
        )
    # Wrappers that gather weights have to be called; DDP's would wait for a backward pass
    call = wrapped if is_sharded(accelerator) else None
    kept = count_kept_bytes(base, flat_model.route, call, accelerator.device, images, **arguments)
    if images:  # a frozen tower keeps nothing
        training = np.flatnonzero(kept.kept.sum(1)).tolist()
        layers, kept = [layers[i] for i in training], kept.of(training)
    gc.collect()  # leftovers of the start-up check
    held = device_memory.held
    if isinstance(optimizer, tuple):
        made_by = optimizer
    else:
        inner: Any = optimizer
        while "optimizer" in vars(inner):  # unwraps those of accelerate and DeepSpeed
            inner = inner.optimizer
        states = [x for state in inner.state.values() for x in state.values() if torch.is_tensor(x)]
        held -= tensor_bytes(x for x in states if x.device.type == accelerator.device.type)
        # Defaults may hold what the class does not accept, such as AdamW's `decoupled_weight_decay`
        accepted = inspect.signature(type(inner)).parameters
        made_by = type(inner), {name: x for name, x in inner.defaults.items() if name in accepted}
    shards = accelerator.num_processes if zero_stage(accelerator) in (1, 2) else 1
    fixed, budget = fixed_bytes(models, made_by, held, shards), budget_bytes(option, accelerator.device)
    if (group := flat_model.group) is not None:  # all plan for the largest needs and the smallest budget of any
        kept = KeptBytes(*map(group.largest, vars(kept).values()))
        fixed, budget = (abs(x) for x in group.largest([fixed, -budget]).tolist())
    flat_model.recomputable = layers
    planner.budget, planner.needs = budget, MemoryNeeds(fixed, kept, head, float(kept.factor))
    return planner
