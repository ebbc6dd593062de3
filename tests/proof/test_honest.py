"""Honest runs are not stopped, and have the same bits as without looks."""

import pytest
import torch

from tests.helpers.folders import needs
from tests.helpers.random_runs import DTYPES, outcome_of_looks
from tests.helpers.tiny import DATA, SEED, arguments, reward_model
from tests.proof.families import FAMILIES, honest
from tests.runs import make_trainer

OF_ALL = needs("arranging", "budgets", "heads", "online", "recurrent", "slices")  # draws combine what these add


@pytest.mark.trl_1
@OF_ALL
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(SEED * 1000, SEED * 1000 + 10))
def test_a_random_draw_has_the_same_bits_with_looks(seed):
    result = outcome_of_looks(seed)
    assert result["verdict"] in ("same", "refused"), result


@pytest.mark.drawn(4)
@needs("recurrent")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_look_finds_a_mistake_in_an_honest_family(name, dtype):
    found = honest(name, dtype, steps=2)
    assert not isinstance(found, str), found
    assert found.number or name == "phimoe"  # which draws its experts at random in training


def test_chance_that_repeats_itself_is_no_mistake():
    """Phi-MoE draws between experts whose scores are close: two flat passes may agree, and the rows alone not."""
    found = honest("phimoe", torch.float64, steps=2)
    assert not isinstance(found, str), found


@needs("heads", "slices")
def test_scores_whose_terms_nearly_cancel_differ_by_the_rounding_of_the_terms():
    """And in slices, rows alone round alike however they are padded."""
    model, data = reward_model(), DATA["reward"](2, SEED)
    options = {"check_steps": 1, "steps": 1, "train_dataset": data, "max_tokens_per_micro_batch": 8}
    trainer = make_trainer("reward", "flat", **options, **arguments("reward", model=model, adapters=False))
    rows = [row[name] for row in trainer.train_dataset for name in ("chosen_ids", "rejected_ids")]
    with torch.no_grad():
        states = [model.model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        within = torch.linalg.svd(torch.stack(states), full_matrices=False).Vh
        weight = model.score.weight
        weight -= weight @ within.mT @ within
        weight *= 64 / weight.norm()  # of scores next to 0, whose terms are about 10
    trainer.train()
    assert trainer._looks.found.rows == 2  # of the first part
