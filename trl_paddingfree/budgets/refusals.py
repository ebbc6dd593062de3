"""What budgets rule out."""

import numpy as np
import torch
from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..core import upstream
from ..core.flat.batch import Inputs
from ..core.model.edits import COMPARED, EditedRowsError
from ..core.trainers.configs import PaddingFreeOptions
from ..core.trainers.engine import zero_stage
from .device import budget_bytes


def refuse_beside_budget(options: PaddingFreeOptions, config: TrainingArguments) -> None:
    """Refuse optimizers that step in the backward pass and, with `memory_budget`, options that govern activations."""
    if not options.has_budget:
        return
    optim = OptimizerNames(config.optim).value
    if "layerwise" in optim or "lomo" in optim:
        raise ValueError(
            f"`optim={optim!r}` steps within each backward pass, and micro-batches above a budget have several: leave "
            "`memory_budget` and `max_tokens_per_micro_batch` out, or take another optimizer."
        )
    if options.memory_budget is None:
        return
    budget_bytes(options.memory_budget, config.device)  # refuses more than the device has
    kwargs = vars(config)["gradient_checkpointing_kwargs"] or {}
    offloads = vars(config).get("activation_offloading")  # not all of TRL's configurations have it
    every = kwargs.get("every_n_layers", 1)
    of_kwargs = "gradient_checkpointing_kwargs"
    moves = "it moves to the CPU what the budget counts"
    hides = "it keeps results of attention that no count of saved tensors shows"
    for is_set, name, reason in (
        (offloads, "`activation_offloading=True`", moves),
        (kwargs.get("selective"), f"`{of_kwargs}={{'selective': True}}`", hides),
        (kwargs.get("offload"), f"`{of_kwargs}={{'offload': True}}`", moves),
        (every != 1, f"`{of_kwargs}={{'every_n_layers': {every}}}`", "it decides which layers recompute, too"),
    ):
        if is_set:
            raise ValueError(
                f"`memory_budget={options.memory_budget}` cannot be combined with {name}: {reason}. Leave one of them "
                "out."
            )


def is_reentrant(options: PaddingFreeOptions, config: TrainingArguments) -> bool:
    """Whether layers recompute by reentrant checkpoints: a memory budget has them recompute, whatever is set."""
    recomputes = options.memory_budget is not None or bool(config.gradient_checkpointing)
    return recomputes and upstream.is_reentrant(config)


def refuse_lost_router_loss(options: PaddingFreeOptions, config: TrainingArguments, reasons: list[str]) -> None:
    """
    Refuse reentrant checkpoints under a budget if routers have a loss: `reasons` are the options that give them one.
    Such checkpoints lose the gradients of router logits, and the budget decides which layers are checkpointed.
    """
    if options.has_budget and is_reentrant(options, config) and reasons:
        raise ValueError(
            f"`gradient_checkpointing_kwargs={{'use_reentrant': True}}` cannot be combined with {reasons[0]} and "
            "`memory_budget` or `max_tokens_per_micro_batch`: layers that recompute this way lose gradients of the "
            "router loss, and the budget decides which layers recompute. Set `use_reentrant` to `False`."
        )


def refuse_lost_gradients(accelerator: Accelerator, config: TrainingArguments) -> None:
    """
    Refuse ZeRO-2 with an offloaded optimizer: without accumulation, it keeps only the last part's gradients. Also a
    static graph of DDP, which expects one backward pass.
    """
    if config.ddp_static_graph:
        raise ValueError(
            "`ddp_static_graph=True` expects one backward pass per micro-batch, and one above a budget has several: "
            "leave it, or `memory_budget` and `max_tokens_per_micro_batch`, out."
        )
    if zero_stage(accelerator) != 2 or config.gradient_accumulation_steps > 1:
        return
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    offload = zero.get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        raise ValueError(
            "ZeRO-2 with `offload_optimizer_device` and `gradient_accumulation_steps=1` keeps the gradients of the "
            "last part of a micro-batch only. Set `gradient_accumulation_steps=2`, offload nothing, or leave "
            "`memory_budget` and `max_tokens_per_micro_batch` out."
        )


def refuse_lost_rows() -> None:
    """Reject the inputs of a training step that lack the rows of which parts are made."""
    raise EditedRowsError(
        "The inputs of `training_step` have no `rows`, from which parts are made: pass on all that the collator "
        "gave, made with `keeps_rows=True`, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
    )


def refuse_lost_values(inputs: Inputs, made: Inputs) -> None:
    """
    Reject inputs of a micro-batch that differ from what the collator `made`, because its parts would lack the change.
    Waits for the device if the collator returns more than what is [`~trl_paddingfree.core.model.edits.COMPARED`].
    """
    for name, value in inputs.items():
        before = made.get(name)
        is_lost = name not in ("flat_batch", "rows", *made)
        if isinstance(value, torch.Tensor) and name not in COMPARED and before is not None and before is not value:
            before = torch.as_tensor(before).to(value.dtype)  # engines cast floats to their dtype
            is_lost = not np.array_equal(value.cpu().double(), before.double(), equal_nan=True)
        if is_lost:
            raise EditedRowsError(
                f"`{name}` of a micro-batch was added or changed after the collator. This micro-batch runs in parts, "
                "which are made of what the collator gave: make the change in `torch_call` of a subclass of this "
                "package's collator, or leave `memory_budget` and `max_tokens_per_micro_batch` out."
            )
