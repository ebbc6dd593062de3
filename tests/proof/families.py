"""Honest runs of many model families, in which no look may find a mistake."""

from typing import Any

import torch

from tests.core.check.test_architectures import EAGER_ONLY, MUST_WORK
from tests.helpers.architectures import tiny_model
from tests.helpers.float64 import in_float64
from tests.helpers.tiny import DATA, arguments
from tests.runs import make_trainer
from trl_paddingfree import UnprovenModelError
from trl_paddingfree.proof.certificate import Certificate

# With layers that carry states, too
FAMILIES = {**MUST_WORK, **{name: (name, {}) for name in ("qwen3_next", "falcon_h1", "lfm2", "mamba2", "zamba2")}}


def honest(name: str, dtype: torch.dtype, steps: int, task: str = "sft") -> Certificate | str:
    """What looks at each step of a run have found or, in words, the mistake that ended it."""
    kind, options = FAMILIES[name]
    attention = "eager" if name in (*EAGER_ONLY, "mamba2") else "sdpa"
    model: Any = tiny_model(kind, attn_implementation=attention, **options).to(dtype)
    if dtype == torch.float64:
        model = in_float64(model)
    if model.base_model is model:  # Llama 4
        model.base_model_prefix = "model"
    given = {"router_aux_loss_coef": 0.0}  # of some mixtures, TRL's loss of the routers finds no number of experts
    given |= {"check_steps": 1, "steps": steps, "per_device_train_batch_size": 8, "train_dataset": DATA[task](64, 1)}
    try:
        trainer = make_trainer(task, "shared", **given, **arguments(task, model=model, adapters=False))
        trainer.train()
    except UnprovenModelError as error:
        return str(error)
    return trainer._looks.found
