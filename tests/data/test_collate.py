"""What the collators make of rows: each is a bug of padding-free training elsewhere."""

from dataclasses import dataclass

import pytest
import torch
from trl.experimental.tpo.tpo_trainer import DataCollatorForTriplePreference
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_paddingfree import FlatCollator, LanguageModelingCollator, PreferenceCollator
from trl_paddingfree.model.masks import boundaries

PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11, 12]},
]


def test_packed_labels_are_cut_where_their_tokens_are():
    """trl#5076, also trl#3749: the masks of prompts survive packing, here as labels of -100."""
    packed = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, 5], "seq_lengths": [3, 2]}
    batch = LanguageModelingCollator(pad_token_id=0, padding_free=True)([packed])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]
    assert batch["flat_batch"].shift_labels.tolist() == [[2, 3, 5]]


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_every_sequence_is_truncated_before_anything_is_shared(mode):
    """trl#5305, also #5350, #5362, ms-swift#5665, and trl#3398: `keep_end` with padding-free zeroed samples."""
    options = {"pad_token_id": 0, "max_length": 3, "truncation_mode": mode}
    padded, ours = PreferenceCollator(**options)(PAIRS), PreferenceCollator(**options, padding_free=True)(PAIRS)
    assert torch.equal(padded["input_ids"], ours["input_ids"])
    lengths = padded["attention_mask"].sum(1).tolist()
    rows = [row[:n].tolist() for row, n in zip(padded["input_ids"], lengths, strict=True)]
    assert ours["flat_batch"].to_rows() == rows
    assert ours["flat_batch"].layout.segments.max_seqlen_k == 3


def test_every_tensor_has_the_type_that_models_want():
    """transformers#31629, also #42502, #42620, #41652, #33946: a flattening collator gave lists, floats, separators."""
    batch = PreferenceCollator(pad_token_id=0, padding_free=True)(PAIRS)["flat_batch"]
    types = {name: x.dtype for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    assert types.pop("row_mask") == torch.bool
    assert set(types.values()) == {torch.int64}
    told = boundaries(batch.layout)
    assert [type(x) for x in told.values()] == [torch.Tensor, torch.Tensor, int, int, torch.Tensor]
    assert {x.dtype for x in told.values() if isinstance(x, torch.Tensor)} == {torch.int32}
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, 9, 3, 6, 8, 10, 11, 12]]  # no separators


def test_boundaries_of_rejected_rows_are_not_offset_by_the_padding_of_chosen_ones():
    """open-instruct#1900. That a new adapter starts at ln 2 for it, test_dpo.py shows."""
    batch = PreferenceCollator(pad_token_id=0, padding_free=True, prefix_sharing=False)(PAIRS)["flat_batch"]
    assert batch.layout.cu_seqlens_q.tolist() == [0, 5, 8, 12, 17]


class Edits(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        rows = super().torch_call(examples)
        rows["labels"][:, : examples[0]["number"]] = -100
        return rows


class FlatEdits(LanguageModelingCollator, Edits):
    pass


def test_a_collator_of_ones_own_behind_ours_is_asked():
    examples = [{"input_ids": [1, 2, 3], "number": 2}, {"input_ids": [4, 5, 6, 7]}]
    padded, ours = Edits(0)(examples), FlatEdits(0, padding_free=True, cuts_packed=False)(examples)
    assert all(torch.equal(rows, ours[name]) for name, rows in padded.items())
    assert ours["flat_batch"].shift_labels.tolist() == [[3, 6, 7]]


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
    pairs = [{**PAIRS[0], "chosen_ids": [9] * (3 if i < 4 - kept else 2)} for i in range(4)]
    rows = Pairs(0, padding_free=True, keeps_rows=True)(pairs)["rows"]
    rows.rows["number"] = torch.arange(2 * kept)
    assert (rows.num_items, rows.take([0], None).rows["number"].tolist()) == (kept, [0, kept])


def test_a_collator_of_other_rows_that_leaves_some_out_says_how_many_an_example_has():
    triples = [{**PAIRS[0], "chosen_ids": [9] * (i + 1), "reference_ids": [8]} for i in range(4)]
    with pytest.raises(ValueError, match="gives 6 rows for 4 examples.*`rows_per_example = 2`"):
        Triples(0, padding_free=True)(triples)
