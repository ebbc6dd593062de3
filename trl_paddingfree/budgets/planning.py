"""
Makes the planner of a run: counts activations, and adds up weights, gradients and optimizer state. Tries the largest
examples against its budget.
"""

import gc
import inspect
from typing import Any

import numpy as np
import torch

from ..core.data.lengths import example_tokens, row_lengths
from ..core.trainers.engine import is_sharded, zero_stage
from ..coupling import may_couple
from ..recomputable import recomputable_layers
from .device import budget_bytes
from .kept_bytes import KeptBytes, count_kept_bytes
from .needs import MemoryNeeds, fixed_bytes, tensor_bytes
from .planner import MemoryPlanner
from .refusals import is_reentrant


def make_planner(trainer: Any) -> MemoryPlanner:
    """
    The planner of a `trainer` within its budgets. All models must have their weights. With `memory_budget`, sets the
    layers of the trained model that may recompute, and refuses a model without any.
    """
    flat, args, accelerator, models = trainer.runtime, trainer.args, trainer.accelerator, trainer.flat_models()
    flat_model, option = flat.trained, flat.options.memory_budget
    planner = MemoryPlanner(
        flat_model,
        accelerator,
        flat.peak_memory,
        limit=flat.options.max_tokens_per_micro_batch,
        option=option,
        is_reentrant=is_reentrant(flat.options, args),
        measures=args.skip_memory_metrics,  # else transformers reads the peak since training began
    )
    if option is None:
        return planner
    images = trainer.batches_beside_text()  # arguments of calls with different numbers of them
    base = flat_model.model
    devices = {p.device for model in models for p in model.parameters() if p.device.type == accelerator.device.type}
    if len(devices) > 1:
        raise ValueError(
            f"`memory_budget={option}` counts the memory of one device, and `device_map` has spread the weights over "
            f"{len(devices)}. Leave it out, and set `max_tokens_per_micro_batch`."
        )
    layers = recomputable_layers(base, bool(images))
    if not layers or not base.supports_gradient_checkpointing:
        raise ValueError(
            f"`memory_budget={option}`: {type(base).__name__} has no layers that can recompute their "
            "activations. Leave `memory_budget` out and set `max_tokens_per_micro_batch`."
        )
    # Wrappers that gather weights have to be called; DDP's would wait for a backward pass
    call = trainer.model_wrapped if is_sharded(accelerator) else None
    arguments = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    kept = count_kept_bytes(base, flat_model.route, call, accelerator.device, images, **arguments)
    if images:  # a frozen tower keeps nothing
        training = np.flatnonzero(kept.kept.sum(1)).tolist()
        layers, kept = [layers[i] for i in training], kept.of(training)
    gc.collect()  # leftovers of the start-up check
    held = flat.peak_memory.held
    fixed, budget = fixed_of(trainer, held), budget_bytes(option, accelerator.device)
    # All processes that compute the same batches plan for the largest needs and the smallest budget of any
    largest = flat_model.peers.largest
    kept = KeptBytes(*map(largest, vars(kept).values()))
    fixed, budget = (abs(x) for x in largest([fixed, -budget]).tolist())
    planner.layers = layers
    head = type(trainer).head_bytes(*(each.model for each in flat.models))
    padding = float(kept.factor)
    planner.budget, planner.needs = budget, MemoryNeeds(fixed, kept, head, correction=padding, padding=padding)
    return planner


def fixed_of(trainer: Any, held: int = 0) -> int:
    """
    Bytes of the weights, gradients and optimizer state of a `trainer`, or those `held` before training in place of
    weights if they are more. An optimizer that is there already is among them.
    """
    accelerator, args = trainer.accelerator, trainer.args
    if (inner := trainer.optimizer) is None:
        made_by = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    else:
        while "optimizer" in vars(inner):  # unwraps those of accelerate and DeepSpeed
            inner = inner.optimizer
        states = [x for state in inner.state.values() for x in state.values() if torch.is_tensor(x)]
        held -= tensor_bytes(x for x in states if x.device.type == accelerator.device.type)
        # Defaults may hold what the class does not accept, such as AdamW's `decoupled_weight_decay`
        accepted = inspect.signature(type(inner)).parameters
        made_by = type(inner), {name: x for name, x in inner.defaults.items() if name in accepted}
    shards = accelerator.num_processes if zero_stage(accelerator) in (1, 2) else 1
    return fixed_bytes(trainer.flat_models(), made_by, held, shards)


def bytes_before_tokens(trainer: Any) -> int:
    """Bytes that training of a `trainer` takes before its first token: a budget below that holds no step."""
    head = type(trainer).head_bytes(*map(trainer.flat_base, trainer.flat_models()))
    return fixed_of(trainer) + head.constant


def refuse_small_budget(trainer: Any, planner: MemoryPlanner) -> None:
    """Refuse a budget that the most demanding example of a `trainer` with a collator does not fit into."""
    if not trainer.knows_lengths:
        return  # lengths are unknown until an example arrives: the planner refuses it then
    lengths, dataset = trainer.item_lengths(), trainer.train_dataset
    tokens = example_tokens(lengths, trainer.runtime.trained.route.prefix_sharing)
    planner.refuse_oversized(int(tokens.max()), f"example {tokens.argmax()}")
    if planner.needs is None:
        return
    # Layers need most for the most tokens, attention for the longest row, and the head for the longest completions. The
    # example that needs most overall is assumed to be among the 16 largest by one of these
    orders = np.argsort((tokens, row_lengths(lengths).max(1), lengths[:, -2:].sum(1)), kind="stable")
    collator = trainer.data_collator.changed(keeps_rows=True)
    try:
        batches = [
            (batch, f"example {i} of the training data")
            for i in {*orders[:, -16:].flat}
            for batch in collator([dataset[int(i)]])["rows"].alone(collator)
        ]
        if may_couple(trainer):  # a micro-batch is not divided into parts: all of it has to fit
            largest = [dataset[int(i)] for i in orders[0, -trainer._train_batch_size :]]
            batches.append((collator(largest)["flat_batch"], "a micro-batch of the largest examples"))
    except Exception:  # one of the user's own may fail on a single example
        if type(collator) is trainer.task.collator:
            raise
        return
    for batch, name in sorted(batches, key=lambda each: planner.least_bytes(each[0]))[-1:]:
        if planner.least_bytes(batch) > planner.budget:
            raise planner.too_small_for(batch, name)
