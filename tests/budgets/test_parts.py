"""Micro-batches that a budget cannot hold run in parts or in slices, with the loss of the whole."""

from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback
from trl import DPOTrainer

from tests.helpers.architectures import is_older
from tests.helpers.memory import LAYERS, layered, most_slices, with_images
from tests.helpers.tiny import (
    DATA,
    FOLLOWING,
    ROUTED,
    SEED,
    arguments,
    following_rotary,
    lora,
    make_model,
    preference_data,
)
from tests.helpers.vision import on_images, vision_pairs
from tests.runs import assert_same, compare, make_trainer, run, train
from trl_paddingfree import FlatBatch, PaddingFreeDPOTrainer
from trl_paddingfree.budgets.planner import MemoryPlanner
from trl_paddingfree.budgets.steps import adds_up_shards
from trl_paddingfree.core.device import GIB
from trl_paddingfree.slices import decoder as slices

WAIT = 60  # seconds for another thread, at most


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("loss_type", "routed"),
    [(["aot"], {}), (["sigmoid", "sft"], {}), (["aot_unpaired"], {}), (["sigmoid"], ROUTED)],
    ids=["aot", "sft", "aot-unpaired", "routers"],
)
@pytest.mark.parametrize("limit", ["memory", "tokens"])
def test_losses_that_couple_examples_run_in_slices_beneath_the_loss(loss_type, routed, limit, passes, hold_tokens):
    def make():
        return arguments("dpo", model=make_model("mixtral" if routed else "llama", num_hidden_layers=LAYERS, **routed))

    options = {"steps": 2, "per_device_train_batch_size": 8, "loss_type": loss_type}
    compare("dpo", make, preference_data(16, SEED), "ours", ours=limited(limit, 120, hold_tokens), **options)
    assert most_slices(passes) > 1


def limited(limit, number, hold_tokens):
    """Options of a trainer whose micro-batches hold so many tokens."""
    if limit == "tokens":
        return {"max_tokens_per_micro_batch": number}
    hold_tokens(number)
    return {"memory_budget": 8}


@pytest.mark.parametrize(
    ("task", "limit", "reentrant", "options"),
    [
        ("grpo", "memory", True, {"loss_type": "grpo", "gradient_accumulation_steps": 2}),
        ("grpo", "memory", False, {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "use_adaptive_entropy": True}),
        ("grpo", "tokens", False, {"loss_type": "bnpo", "num_iterations": 2, "peft_config": lora()}),
        ("rloo", "tokens", True, {"num_iterations": 2, "peft_config": lora()}),
    ],
    ids=["grpo", "bnpo", "tokens", "rloo"],
)
def test_slices_have_the_loss_of_padded_trl(data, task, limit, reentrant, options, passes, hold_tokens):
    options = {**options, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    ours = limited(limit, 25, hold_tokens)
    compare(task, partial(layered, "grpo"), data, "shared", ours=ours, **options)
    assert most_slices(passes) > 1


def test_slices_compute_a_prompt_once(data, passes):
    words = " ".join(["word"] * 40)
    long = data.map(lambda row: {"prompt": [{"role": "user", "content": f"{words} {row['prompt'][0]['content']}"}]})
    whole = run("grpo", "shared", **layered("grpo"), train_dataset=long, steps=1).trainer.total_counts()
    most = {"max_tokens_per_micro_batch": int(0.4 * whole.computed)}
    parts = run("grpo", "shared", **layered("grpo"), train_dataset=long, steps=1, **most).trainer.total_counts()
    assert parts == whole
    assert most_slices(passes) == 3


@FOLLOWING
def test_slices_have_the_frequencies_of_the_whole(data, kind, passes):
    def make():
        return {**layered("grpo"), "model": make_model(**following_rotary(24, kind))}

    compare("grpo", make, data, "flat", ours={"max_tokens_per_micro_batch": 30})
    assert most_slices(passes) > 1


def test_slices_are_computed_again_as_they_were(data, passes, monkeypatch):
    options = {"train_dataset": data, "max_tokens_per_micro_batch": 30, "steps": 1}
    options["peft_config"] = lora(lora_dropout=0.3)
    runs = []
    for compute in (checkpoint, lambda function, *args, use_reentrant: function(*args)):
        monkeypatch.setattr(slices, "checkpoint", compute)
        runs.append(run("rloo", "shared", **layered("rloo"), **options))
    assert most_slices(passes) > 1
    assert_same(*runs, tolerance=0, ignored=())


@pytest.mark.skipif(is_older("5.20"), reason="a mixture with a router loss cannot generate: padded neither")
def test_the_loss_of_routers_in_slices_is_that_of_the_whole(data, passes, hold_tokens):
    def make():
        return {**layered("grpo"), "model": make_model("mixtral", **ROUTED)}

    hold_tokens(30)
    compare("grpo", make, data, "flat", ours={"memory_budget": 8})
    assert most_slices(passes) > 1


@pytest.fixture
def made(monkeypatch):
    """A list that gets the parts into which each micro-batch is divided."""
    made, parts_of = [], MemoryPlanner.parts
    monkeypatch.setattr(MemoryPlanner, "parts", lambda *args: made.append(parts_of(*args)) or made[-1])
    return made


def test_micro_batches_in_parts_count_their_images(made):
    data = vision_pairs(8, SEED)
    plan = with_images("llava", "dpo", data).planner
    least = plan.needs.fixed + 0.7 * (plan.current.schedule.peak - plan.needs.fixed)
    ours = {"memory_budget": 2 * least / GIB}  # in float64
    compare("dpo", partial(on_images, "llava", "dpo"), data, "shared", ours=ours)
    assert max(map(len, made)) > 1


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("loss_type", [["sigmoid"], ["sigmoid", "sft"]], ids=["above the loss", "beneath it"])
def test_parts_with_and_without_images_follow_padded_trl(kind, loss_type, passes, made):
    """Positions that a model counts by grids, and parts in which no row has an image while others have."""
    options = {"loss_type": loss_type, "per_device_train_batch_size": 8}
    options["ours"] = {"max_tokens_per_micro_batch": 40}
    compare("dpo", partial(on_images, kind, "dpo", lora=True), vision_pairs(8, SEED), "shared", **options)
    assert bool(made) == (loss_type == ["sigmoid"])
    assert max(map(len, made), default=0) > 1 or most_slices(passes) > 1


@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_a_trainer_in_another_thread_does_not_see_parts(task, made):
    """accelerate's state of gradients is one per process: this trainer steps while another one computes a part."""
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 8, "steps": 2}
    options |= {"train_dataset": DATA[task](16, SEED), "max_tokens_per_micro_batch": 100}

    def make():
        return make_trainer(task, "ours", **arguments(task, adapters=False), **options)

    alone, ours, other, runs = train(make()), make(), make(), []
    is_in_part, has_stepped = Event(), Event()
    thread = Thread(target=lambda: runs.append(train(other)))

    def wait_in_part(*_):
        is_in_part.set()
        assert has_stepped.wait(WAIT)

    def step_meanwhile(*_, **__):
        if not thread.ident:  # in the first step
            thread.start()
            assert is_in_part.wait(WAIT)

    other.model.register_forward_hook(wait_in_part)
    callback = TrainerCallback()
    callback.on_pre_optimizer_step = step_meanwhile
    callback.on_step_end = lambda *_, **__: has_stepped.set()
    ours.add_callback(callback)
    runs.append(train(ours))
    thread.join(WAIT)
    assert min(map(len, made)) > 1
    for trained in runs:
        assert_same(alone, trained, ignored=())
    assert len(runs) == 2


@pytest.mark.parametrize("is_spread", [False, True])
def test_backward_passes_over_several_devices_run_in_one_thread(is_spread, monkeypatch):
    """Two threads would recompute one slice at once, which PyTorch's checkpoints do not expect."""
    options = {**arguments("dpo", adapters=False), "max_tokens_per_micro_batch": 40, "loss_type": "aot", "steps": 1}
    trainer, seen = make_trainer("dpo", "ours", **options), set()

    def spread(*_, **__):  # once the trainer has moved the model: no second device is there to put a layer on
        elsewhere = torch.empty(1, device="meta")
        trainer.model.elsewhere = torch.nn.Parameter(elsewhere, requires_grad=False)

    callback = TrainerCallback()
    callback.on_step_begin = spread if is_spread else callback.on_step_begin
    trainer.add_callback(callback)
    backward = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda *args: seen.add(torch._C._is_multithreading_enabled()) or backward(*args)
    )
    trainer.train()
    assert seen == {not is_spread}
    seen.clear()
    prove_again = "trl_paddingfree.core.trainers.proving.StartUpCheck.prove_again"  # of slices
    monkeypatch.setattr(prove_again, lambda *args: seen.add(torch._C._is_multithreading_enabled()))
    trainer.planner = None
    trainer.plan_memory(trainer.model)
    assert seen == {not is_spread}
    assert torch._C._is_multithreading_enabled()


class NoSuchPairError(Exception):
    """What a guard of the user's raises."""


def guarded(trainer_class, catches=NoSuchPairError):
    """A trainer whose model refuses a token, and whose steps leave out micro-batches that have it."""

    class Guarded(trainer_class):
        has_zeroed = False
        norms: ClassVar[list] = []

        def training_step(self, model, *args, **kwargs):
            try:
                return super().training_step(model, *args, **kwargs)
            except catches:
                self.norms.append(sum(p.grad is not None and p.grad.norm().item() for p in model.parameters()))
                if self.has_zeroed:
                    model.zero_grad()
                return torch.zeros(())

    def guard(module, args):
        if (args[0] == REFUSED).any():
            raise NoSuchPairError

    def make(*args, **kwargs):
        trainer = Guarded(*args, **kwargs)
        trainer.norms = []
        trainer.model.get_input_embeddings().register_forward_pre_hook(guard)
        return trainer

    return make


REFUSED = 9 + 59  # the last word


def with_a_refused_pair(number):
    """Micro-batches of four pairs. In one, the shortest pair, and thus the last part, has a word that is refused."""

    def words(start, number):
        return "".join(f" w{(start + i) % 59}" for i in range(number))

    sizes = [12, 14, 16, 18] * 4
    rows = [
        {"prompt": words(7 * i, 8)[1:], "chosen": words(5 * i, size), "rejected": words(3 * i, size)}
        for i, size in enumerate(sizes)
    ]
    rows[4 * number]["chosen"] = f" w59{words(number, 8)}"
    return Dataset.from_list(rows)


FAILING = {
    "train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "logging_steps": 1, "steps": 3,
    "adapters": False,
}  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_micro_batch_that_fails_in_a_later_part_counts_for_nothing(accumulation, made):
    """Its user catches what his own guard raises. No gradients are there yet, so that those of its parts can go."""
    options = {**FAILING, "gradient_accumulation_steps": accumulation, "steps": 4 // accumulation}
    data = with_a_refused_pair(2)
    make = partial(arguments, "dpo", options.pop("adapters"))
    padded = run("dpo", "padded", trainer_class=guarded(DPOTrainer), **make(), train_dataset=data, **options)
    limit = {"max_tokens_per_micro_batch": 50}
    ours = run(
        "dpo", "ours", trainer_class=guarded(PaddingFreeDPOTrainer), **make(), train_dataset=data, **options, **limit
    )
    assert set(map(len, made)) == {4}
    assert padded.trainer.norms == ours.trainer.norms == [0]
    assert_same(padded, ours)


@pytest.mark.parametrize("catches", [NoSuchPairError, Exception])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_gradients_of_a_failed_micro_batch_are_never_trained_on(number, catches, made):
    """
    Those of the micro-batches before it are the same tensors: training ends, unless its user sets them to zero, and
    even if what has caught the error catches this one, too.
    """
    data, options = with_a_refused_pair(number), {**FAILING, "gradient_accumulation_steps": 4}
    options |= {**arguments("dpo", options.pop("adapters")), "steps": 1, "max_tokens_per_micro_batch": 50}
    trainer = make_trainer(
        "dpo", "ours", trainer_class=guarded(PaddingFreeDPOTrainer, catches), train_dataset=data, **options
    )
    with pytest.raises(RuntimeError, match=r"Call `trainer.model.zero_grad\(\)` in what catches the error"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.has_zeroed = True
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("version", "offloads", "expected"), [(1, False, True), (1, True, False), (2, False, True), (2, True, True)]
)
def test_parts_are_added_up_in_shards_but_where_fsdp1_offloads_them(version, offloads, expected):
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=offloads))
    assert adds_up_shards(SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)) is expected
    assert not adds_up_shards(SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, state=state))


def test_parts_of_pairs_that_attention_keeps_grow_as_squares():
    """Under a dense mask, the pairs of two examples in a part are more than those of each."""
    plan = make_trainer("dpo", "flat", flat_attention="mask", memory_budget=8).planner
    rng = np.random.default_rng(SEED)
    for _ in range(20):
        rows = [[5] * n for n in rng.integers(2, 60, 6)]
        alone = [plan.features(FlatBatch.from_rows([row], [row], prefix_sharing=False)) for row in rows]
        together = plan.features(FlatBatch.from_rows(rows, rows, prefix_sharing=False))
        plan.budget = int(plan.needs.peaks(together).min()) - 1
        parts = plan.parts(alone)
        assert len(parts) > 1
        for part in parts:
            of_part = [rows[i] for i in part]
            load = plan.features(FlatBatch.from_rows(of_part, of_part, prefix_sharing=False))
            assert plan.needs.peaks(load).min() <= plan.budget
