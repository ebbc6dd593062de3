"""Collators of one's own before and behind ours."""

from dataclasses import dataclass

import pytest
import torch
from trl.experimental.tpo.tpo_trainer import DataCollatorForTriplePreference
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_paddingfree import FlatCollator, LanguageModelingCollator

PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}


class Weighing(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        return {**super().torch_call(examples), "weight": examples[0]["weight"]}


@dataclass
class Instructions(LanguageModelingCollator, Weighing):
    pass


def test_a_collator_of_ones_own_behind_ours_is_asked():
    assert Instructions(0, padding_free=True)([{"input_ids": [1], "weight": 2}])["weight"] == 2


class LeavesOut:
    """Leaves out the examples with a long answer, as a collator of one's own may before it hands on."""

    def torch_call(self, examples):
        return super().torch_call([example for example in examples if len(example["chosen_ids"]) < 3])


@dataclass
class Pairs(LeavesOut, FlatCollator, DataCollatorForPreference):
    pass


@dataclass
class Triples(LeavesOut, FlatCollator, DataCollatorForTriplePreference):
    pass


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_rows_of_pairs_stay_together_where_a_collator_leaves_some_out(kept):
    """Four rows for four examples were taken for four examples of one row each, and parts tore pairs apart."""
    pairs = [{**PAIR, "chosen_ids": [9] * (3 if i < 4 - kept else 2)} for i in range(4)]
    rows = Pairs(0, padding_free=True, keeps_rows=True)(pairs)["rows"]
    rows.rows["number"] = torch.arange(2 * kept)
    assert (rows.num_items, rows.take([0], None).rows["number"].tolist()) == (kept, [0, kept])


def test_a_collator_of_other_rows_that_leaves_some_out_says_how_many_an_example_has():
    triples = [{**PAIR, "chosen_ids": [9] * (i + 1), "reference_ids": [8]} for i in range(4)]
    with pytest.raises(ValueError, match="gives 6 rows for 4 examples.*`rows_per_example = 2`"):
        Triples(0, padding_free=True)(triples)
