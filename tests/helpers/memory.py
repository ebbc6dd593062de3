"""Trainers under a memory budget: what they count and predict, single steps, and allocations that fail on purpose."""

import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers.utils import is_torchvision_available

from tests.helpers.tiny import lora, make_model, make_tokenizer, preference_data, reward_model, score, unpaired
from tests.helpers.versions import is_older
from tests.helpers.vision import on_images
from tests.runs import make_trainer, run
from trl_paddingfree.memory.device import GIB
from trl_paddingfree.memory.kept_bytes import LOADS, load
from trl_paddingfree.memory.needs import MemoryNeeds
from trl_paddingfree.memory.saved_bytes import SavedBytes
from trl_paddingfree.model.architecture import recomputable_layers
from trl_paddingfree.model.flat_model import Decision
from trl_paddingfree.trainers.base import FlatTrainer

SEED = int(os.environ.get("TRL_PADDINGFREE_SEED", 0))
LAYERS = 3
# Vision models: Qwen's images have sizes of their own
KINDS = ["llava", *(["qwen2_5_vl"] if is_torchvision_available() else [])]
# What the prediction may be off by
TOLERANCE = 0.1


def budgeted(task, model, train_dataset, **given):
    """A trainer that has not trained, under a budget that holds everything."""
    options = {"memory_budget": 8, "per_device_train_batch_size": 8, "steps": 2, **given}
    options.setdefault("gradient_checkpointing", options["memory_budget"] is not None)
    return make_trainer(task, "ours", model=model, train_dataset=train_dataset, **options)


def with_images(kind, task, train_dataset, lora=False, **given):
    """A trainer that has trained one step on images, under a budget that holds everything."""
    options = {"memory_budget": 8, "steps": 1, "train_dataset": train_dataset, **given}
    return run(task, "shared", **on_images(kind, task, lora), **options).trainer


def generating():
    """What the online trainers train."""
    model = make_model(num_hidden_layers=LAYERS)
    return {"model": model, "processing_class": make_tokenizer(), "reward_funcs": score}


def generating_with_dropout():
    """The same with adapters."""
    return {**generating(), "peft_config": lora(lora_dropout=0.3)}


def rewarding():
    """What the trainer of reward models trains."""
    return {"model": reward_model(num_hidden_layers=LAYERS), "processing_class": make_tokenizer()}


def adapted():
    """Adapters, for KTO."""
    return {"model": make_model(num_hidden_layers=LAYERS), "processing_class": make_tokenizer(), "peft_config": lora()}


HEADS = {"reward": (rewarding, preference_data), "kto": (adapted, unpaired)}


def ready(trainer):
    """A trainer whose single steps can be called, as `train` leaves it."""
    if trainer.args.gradient_checkpointing:
        kwargs = trainer.args.gradient_checkpointing_kwargs
        trainer.flat_base(trainer.model).gradient_checkpointing_enable(kwargs)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def counted(trainer, batch, number):
    """Bytes that a training forward pass of `batch` saves if the first `number` layers recompute."""
    memory, base = trainer.flat.plan, trainer.flat_base(trainer.model)
    counter = SavedBytes(base, memory.flat_model.recomputable)
    batch = {name: value for name, value in batch.items() if name != "rows"}
    trainer.flat.trained.decide = lambda _: Decision((), number)
    trainer.model.train()
    with counter.counting():
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    assert loss.requires_grad
    kept = sum(counter.total(i) for i in (-1, *range(number, len(memory.flat_model.recomputable))))
    # A checkpoint keeps the input of its layer. Before transformers 5.23, hooks of the layer run within the checkpoint:
    # there the input is counted outside of all layers
    return kept if is_older("5.23") else kept + sum(counter.inputs[:number])


def assert_predicted(trainer):
    memory = ready(trainer).flat.plan
    for batch in trainer.get_train_dataloader():
        saved = memory.needs.saved(load(batch["flat_batch"], memory.flat_model.route))
        for number in (0, 1, len(memory.flat_model.recomputable)):
            assert saved[number] == pytest.approx(counted(trainer, batch, number), rel=TOLERANCE), number


def between(trainer, number):
    """A budget in GiB with which the largest micro-batch of a run recomputes `number` layers."""
    memory = trainer.flat.plan
    peaks = [
        memory.needs.peaks(load(batch["flat_batch"], memory.flat_model.route))
        for batch in trainer.get_train_dataloader()
    ]
    return max(int(peak[number]) for peak in peaks) / GIB


def in_tokens(plan, number):
    """A plan whose memory budget holds so many tokens, once for each layer that keeps its activations."""
    per_token = np.array(LOADS) == "tokens"
    nothing, one = 0.0 * per_token, 1.0 * per_token
    layers = len(plan.flat_model.recomputable)
    plan.needs = MemoryNeeds(0, [one] * layers, [nothing] * layers, nothing, nothing, (0, 0), nothing)
    plan.budget = number
    return plan


def most_slices(passes):
    """The most slices in which a batch was computed."""
    return max(each.decision.num_slices for each in passes)


def step(trainer, batch, number=None):
    """Loss and gradients of one training step, with dropout from the same state."""
    if number is not None:
        trainer.flat.trained.decide = lambda _: Decision((), number)
    torch.manual_seed(SEED)
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(50))
    return [loss, *(p.grad for p in trainer.model.parameters() if p.requires_grad)]


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


def fail_once_planned(monkeypatch, attempts, in_backward, prepare=lambda memory: None):
    """Have allocations fail as in [`failing`] for the rest of a test, in trainers whose memory is planned from now."""
    begin = FlatTrainer.plan_steps

    def plan(trainer, model):
        planned = trainer.flat.plan is not None
        begin(trainer, model)
        if not planned and (memory := trainer.flat.plan) is not None:
            prepare(memory)
            failing(trainer, attempts, in_backward).__enter__()

    monkeypatch.setattr(FlatTrainer, "plan_steps", plan)
