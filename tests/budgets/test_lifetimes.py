"""What outlives a trainer, what an exception while planning leaves, and metrics that nobody knows."""

import gc
import weakref

import pytest
import torch

from tests.helpers.memory import budgeted
from tests.helpers.tiny import SEED, arguments, preference_data
from tests.runs import make_trainer
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
from trl_paddingfree.budgets.planner import MemoryPlanner


@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_a_model_keeps_nothing_of_a_trainer_that_is_gone(task):
    given = arguments(task, False)
    trainer = make_trainer(task, "shared", **given, memory_budget=8, steps=1)
    trainer.train()
    model, parts = trainer.model, (trainer, trainer.planner, trainer.optimizer.optimizer, trainer.accelerator)
    gone = [weakref.ref(part) for part in parts]
    del trainer, parts
    gc.collect()
    assert isinstance(model, torch.nn.Module)
    assert [ref() for ref in gone] == [None] * 4


def test_a_budget_is_not_lost_by_an_exception_while_planning(model_dir, monkeypatch):
    restored, failures = MemoryPlanner.least_bytes, iter([torch.OutOfMemoryError("on purpose")])

    def fail_once(self, batch):
        for error in failures:
            raise error
        return restored(self, batch)

    trainer = budgeted("dpo", model_dir, preference_data(8, SEED))
    trainer.planner = None  # as where weights come late
    monkeypatch.setattr(MemoryPlanner, "least_bytes", fail_once)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        trainer.train()
    assert trainer.planner is None
    trainer.train()
    assert any("flat/memory_budget_gib" in entry for entry in trainer.state.log_history)


def test_the_configuration_of_the_caller_is_not_changed(model_dir):
    options = {"use_cpu": True, "bf16": False, "report_to": "none", "memory_budget": 8}
    own = PaddingFreeDPOConfig("out", gradient_checkpointing=False, **options)
    before = dict(vars(own))
    trainer = PaddingFreeDPOTrainer(model_dir, args=own, train_dataset=preference_data(8, SEED))
    assert trainer.args is own
    own.max_steps = 1
    trainer.train()
    assert vars(own) == before | {"max_steps": 1}


class Watched(PaddingFreeDPOTrainer):
    """A subclass that logs a maximum, as TRL or a user may one day."""

    part_sizes = PaddingFreeDPOTrainer.part_sizes

    def _compute_loss(self, model, inputs, return_outputs=False):
        self._metrics["train"]["longest"].append(float(inputs["completion_mask"].sum(1).max()))
        return super()._compute_loss(model, inputs, return_outputs)


def test_a_metric_that_is_not_known_is_no_mean_over_parts(model_dir):
    given = {"model": model_dir, "max_tokens_per_micro_batch": 40}
    with pytest.raises(ValueError, match="Watched logs `longest`, and the trainer cannot tell how"):
        make_trainer("dpo", "shared", trainer_class=Watched, **given).train()
    known = type("Known", (Watched,), {"extremes": {"longest": max}})
    trainer = make_trainer("dpo", "shared", trainer_class=known, steps=1, logging_steps=1, **given)
    trainer.train()

    assert float(trainer.state.log_history[0]["longest"]).is_integer()  # no mean
