"""Every loss of TRL, and every option of a loss, gives the same training flat as padded."""

import ast
import re

import pytest

from tests.helpers.tiny import lora, make_model, preference_data
from tests.runs import compare, run

SEED = 20261

LOSS_TYPES = [
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
# Those that TRL allows beside another divergence than the reverse KL
DIVERGENCE_LOSSES = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]

OPTIONS = {
    **{loss: {"loss_type": loss, "label_smoothing": 0.1} for loss in LOSS_TYPES},
    "several with weights": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
    "all at once": {"loss_type": LOSS_TYPES, "label_smoothing": 0.3},
    "robust without smoothing": {"loss_type": "robust"},
    "forward_kl": {"f_divergence_type": "forward_kl", "loss_type": DIVERGENCE_LOSSES, "label_smoothing": 0.1},
    "js_divergence": {"f_divergence_type": "js_divergence", "loss_type": DIVERGENCE_LOSSES, "label_smoothing": 0.1},
    "alpha_divergence": {
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.7,
        "loss_type": DIVERGENCE_LOSSES,
        "label_smoothing": 0.1,
    },
    # WPO's weights are tiny for a random model: large `loss_weights` bring the loss back to about 1
    "use_weighting": {
        "use_weighting": True,
        "loss_type": ["sigmoid", "ipo", "bco_pair", "nca_pair"],
        "loss_weights": [60.0, 30.0, 60.0, 60.0],
    },
    "ld_alpha": {"ld_alpha": 0.4, "loss_type": ["sigmoid", "ipo", "sft"]},
    "ld_alpha masks the tail": {"ld_alpha": 0.0},
    "ld_alpha with weighting": {
        "ld_alpha": 0.6,
        "use_weighting": True,
        "loss_type": "sigmoid_norm",
        "loss_weights": [200.0],
    },
    "ld_alpha with precomputed reference": {"ld_alpha": 0.4, "precompute_ref_log_probs": True},
}


@pytest.fixture(scope="module")
def make(tokenizer):
    return lambda: {"model": make_model(), "processing_class": tokenizer, "peft_config": lora(r=2, lora_alpha=2)}


@pytest.mark.drawn(9)
@pytest.mark.parametrize("name", OPTIONS)
def test_flat_training_follows_padded_training(name, make):
    compare("dpo", make, preference_data(12, SEED), **OPTIONS[name])


def test_every_loss_that_trl_knows_is_compared(make):
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        run("dpo", "padded", **make(), train_dataset=preference_data(4, SEED), loss_type="no_such_loss")
    assert ast.literal_eval(re.search(r"\[.*\]", str(error.value))[0]) == LOSS_TYPES


def test_length_desensitized_dpo_counts_completions(model_dir):
    """ms-swift#10072."""
    models = {"model": model_dir, "ref_model": make_model(seed=1)}
    compare("dpo", lambda: models, preference_data(8, SEED), ("shared",), steps=1, ld_alpha=0.5)
