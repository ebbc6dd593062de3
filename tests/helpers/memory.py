"""Trainers under a memory budget: what they count and predict, single steps, and allocations that fail on purpose."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

from tests.helpers.tiny import arguments, make_model, reward_model
from tests.helpers.vision import on_images
from tests.runs import make_trainer, run
from trl_paddingfree.budgets import planning
from trl_paddingfree.budgets.features import FEATURES, TOKENS
from trl_paddingfree.budgets.kept_bytes import KeptBytes
from trl_paddingfree.budgets.needs import MemoryNeeds
from trl_paddingfree.budgets.planner import MemoryPlanner
from trl_paddingfree.budgets.trainers import Budgets
from trl_paddingfree.recomputable import recomputable_layers
from trl_paddingfree.spans import NO_WINDOW

LAYERS = 3
# Vision models: Qwen's images have sizes of their own
KINDS = ["llava", "qwen2_5_vl"]
# The share by which a prediction may be above what is counted, where attention pads; and below it, from rounding
CAUTIOUS, BOLD = 0.3, 0.01


def budgeted(task, model, train_dataset, **given):
    """A trainer that has not trained, under a budget that holds everything."""
    options = {"memory_budget": 8, "per_device_train_batch_size": 8, "steps": 2, **given}
    options.setdefault("gradient_checkpointing", options["memory_budget"] is not None)
    return make_trainer(task, "ours", model=model, train_dataset=train_dataset, **options)


def with_images(kind, task, train_dataset, lora=False, **given):
    """A trainer that has trained one step on images, under a budget that holds everything."""
    options = {"memory_budget": 8, "steps": 1, "train_dataset": train_dataset, **given}
    return run(task, "shared", **on_images(kind, task, lora), **options).trainer


def layered(task):
    """Arguments of the trainer of a task, but for data: a model of so many layers, and adapters for KTO."""
    make = reward_model if task == "reward" else make_model
    return arguments(task, adapters=task == "kto", model=make(num_hidden_layers=LAYERS))


def ready(trainer):
    """A trainer whose single steps can be called, as `train` leaves it."""
    with trainer.as_it_trains(trainer.args):
        if trainer.args.gradient_checkpointing:
            trainer.flat_base(trainer.model).gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def byte_per_token(layers, recomputed=0, fixed=0, of_keys=0):
    """Needs of one byte for each token in each layer, and of so many if it recomputes."""
    one = np.eye(len(FEATURES))[[TOKENS] * layers]
    nothing, keys = np.zeros(len(FEATURES)), (np.array([NO_WINDOW]), np.array([[of_keys]]))
    return MemoryNeeds(fixed, KeptBytes(one, recomputed * one, nothing, nothing, *keys, np.array(0), np.array(1)))


def in_tokens(plan, number):
    """A plan whose memory budget holds so many tokens, once for each layer that keeps its activations."""
    plan.needs = byte_per_token(len(plan.layers))
    plan.budget = number
    return plan


def hold_tokens(monkeypatch, number):
    """Have memory budgets from now on hold so many tokens, as [`in_tokens`] has one."""
    make = planning.make_planner
    monkeypatch.setattr(planning, "make_planner", lambda trainer: in_tokens(make(trainer), number))


def watch_passes(monkeypatch):
    """
    A list that grows with each pass under a budget, with gradients or without: its `batch`, the `schedule`, the one of
    this process `alone`, and whether the pass `trains`. Slices may be as short as rows of tiny models.
    """
    made, scheduled = [], MemoryPlanner.scheduled

    def watch(self, batch, trains):
        result = scheduled(self, batch, trains)
        alone = self.own_schedule(batch)
        made.append(SimpleNamespace(batch=batch, schedule=result.schedule, alone=alone, trains=trains))
        return result

    monkeypatch.setattr(MemoryPlanner, "scheduled", watch)
    monkeypatch.setattr("trl_paddingfree.budgets.planner.LEAST_SLICE", 8)
    return made


def most_slices(passes):
    """The most slices in which a batch was computed."""
    return max(each.schedule.num_slices for each in passes)


@contextmanager
def failing(trainer, attempts, in_backward):
    """Within this context, an allocation fails in the first layer, in forward passes `attempts` or their backward."""
    layer, passes = recomputable_layers(trainer.flat_base(trainer.model))[0], iter(range(1000))

    def fail(*_):
        raise torch.OutOfMemoryError("no memory, on purpose")

    def watch(module, args, output):
        if torch.is_grad_enabled() and next(passes) in attempts:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(fail) if in_backward else fail()

    handle = layer.register_forward_hook(watch)
    yield
    handle.remove()


def fail_once_planned(monkeypatch, attempts, in_backward):
    """Have allocations fail as in [`failing`] for the rest of a test, in trainers whose memory is planned from now."""
    begin = Budgets.plan_memory

    def plan(self, model):
        is_new = self.planner is None
        begin(self, model)
        if is_new and self.planner is not None:
            failing(self, attempts, in_backward).__enter__()

    monkeypatch.setattr(Budgets, "plan_memory", plan)
