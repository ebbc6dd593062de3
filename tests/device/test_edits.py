"""Edited rows are refused before they train, though the host does not wait for the comparison."""

import pytest
from transformers import TrainerCallback

from tests.core.trainers.test_edits import other_tokens
from tests.device.runs import train
from tests.helpers.tiny import DATA, SEED, arguments
from tests.runs import make_trainer
from trl_paddingfree import PaddingFreeSFTTrainer
from trl_paddingfree.core.model.edits import EditedRowsError


class Own(PaddingFreeSFTTrainer):
    """Its loss reads nothing from the device, and its rows are edited."""

    def training_step(self, model, inputs, *args):
        return super().training_step(model, other_tokens(inputs), *args)

    def prediction_step(self, model, inputs, *args, **kwargs):
        return super().prediction_step(model, other_tokens(inputs), *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, fused_lm_head=True, use_cache=False)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Steps(TrainerCallback):
    number = 0

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.number += 1


def test_a_loss_that_never_waits_does_not_train_on_edited_rows():
    steps = Steps()
    options = {"trainer_class": Own, "steps": 1, "logging_nan_inf_filter": False}
    with pytest.raises(EditedRowsError, match="other tokens"):
        train("sft", "ours", lambda: {**arguments("sft"), "callbacks": [steps]}, **options)
    assert steps.number == 0


def test_the_last_rows_of_an_evaluation_are_compared():
    data = DATA["sft"](2, SEED)
    trainer = make_trainer("sft", "ours", train_dataset=data, eval_dataset=data, trainer_class=Own)
    with pytest.raises(EditedRowsError, match="other tokens"):
        trainer.evaluate()
