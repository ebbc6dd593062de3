"""Where a training step makes the host wait for the device: not in this package, but for the places named here."""

from collections import Counter

import pytest
from accelerate import Accelerator
from transformers import TrainerCallback

from tests.device.runs import train
from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import DATA, SEED, arguments
from tests.helpers.vision import on_images, vision_pairs
from tests.pretend_device import WAITS, counted_waits
from tests.runs import make_trainer, run
from trl_paddingfree.core.model import backends

# Generated rows are read back once in each pass of a model: what is flat is laid out on the host
FLATTEN = ("trl_paddingfree/online/rows.py", "generated_on_host")
# There for both models, and for the loss
DISTILLED = ("trl_paddingfree/online/distillation.py", "PaddingFreeDistillationTrainer._rows_of")
PLACES = {"grpo": {FLATTEN: 1}, "rloo": {FLATTEN: 2}, "distillation": {DISTILLED: 1}}


class Steps(TrainerCallback):
    """What had made the host wait as each step began."""

    def __init__(self):
        self.waits = []

    def on_step_begin(self, *args, **kwargs):
        self.waits.append(WAITS.copy())

    @property
    def second(self):
        """What the second step waits for, with its log and its batch; in the first, the optimizer makes its state."""
        return self.waits[2] - self.waits[1]


def waits_of_a_step(task, layout, model=None, **options):
    steps = Steps()
    train(task, layout, lambda: {**arguments(task, model=model), "callbacks": [steps]}, steps=3, **options)
    return steps.second


def places(waits):
    """How often the host waits in each function of this package."""
    found = Counter()
    for wait, number in waits.items():
        if wait.file.startswith("trl_paddingfree/"):
            found[wait.file, wait.function] += number
    return found


@pytest.mark.parametrize("task", DATA)
def test_a_step_waits_in_named_places_only_and_less_than_in_padded_trl(task):
    padded, ours = (waits_of_a_step(task, layout) for layout in ("padded", "shared"))
    assert places(ours) == PLACES.get(task, {})
    assert ours.total() < padded.total()


OPTIONS = {
    "mask": {"flat_attention": "mask"},
    "recomputed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "in parts": {"max_tokens_per_micro_batch": 60},
    "in memory": {"memory_budget": 0.02},
    "bfloat16": {"bf16": True},
}
LAYERS = ["qwen3_next", "lfm2", "qwen3_moe", "gpt_oss", "gemma2"]


@pytest.mark.parametrize("name", [*OPTIONS, *LAYERS])
def test_a_step_with_options_or_layers_of_another_kind_waits_nowhere(name):
    model = tiny_model(name, pad_token_id=0) if name in LAYERS else None
    assert places(waits_of_a_step("dpo", "shared", model, **OPTIONS.get(name, {}))) == {}


def test_images_wait_nowhere():
    steps, data = Steps(), vision_pairs(16, SEED)
    options = {"dataloader_pin_memory": True, "callbacks": [steps]}
    run("dpo", "shared", **on_images("llava", "dpo", lora=True), train_dataset=data, **options)
    assert places(steps.second) == {}


def waits_inside(monkeypatch, layout="shared", **options):
    """What makes the host wait in forward passes of the backbone and in backward passes, once it has been proven."""
    options |= {"dataloader_pin_memory": True, "steps": 2}
    trainer, found = make_trainer("sft", layout, **options), Counter()

    def watched(function):
        def call(*args, **kwargs):
            with counted_waits() as waits:
                result = function(*args, **kwargs)
            found.update(waits)
            return result

        return call

    for owner, name in ((Accelerator, "backward"), (trainer.model.get_base_model().base_model, "forward")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    trainer.train()
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_nothing_waits_inside_the_model(checkpointing, monkeypatch):
    """Neither in this package nor anywhere else, from the first layer to the last gradient."""
    assert waits_inside(monkeypatch, "padded") != {}
    assert waits_inside(monkeypatch, gradient_checkpointing=checkpointing) == {}


def test_a_read_that_is_planted_is_found_by_name(monkeypatch):
    of_segments = backends.ATTENTION["segment"]

    def reading(layout, previous, module, query, *args, **kwargs):
        assert query.sum().item()
        return of_segments(layout, previous, module, query, *args, **kwargs)

    monkeypatch.setitem(backends.ATTENTION, "segment", reading)
    (found,) = waits_inside(monkeypatch)
    assert (found.reason, found.function.split(".")[-1]) == ("local_scalar_dense", "reading")
