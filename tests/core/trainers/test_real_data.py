"""Padded TRL beside ours on text that people and models wrote. Needs a folder of data, and is skipped without one."""

import os
import random
from pathlib import Path

import pytest
from datasets import Dataset, load_dataset

from tests.helpers.tiny import SEED
from tests.runs import compare
from trl_paddingfree import split_turns
from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer

DATA = Path(os.environ.get("TRL_PADDINGFREE_DATA", Path(__file__).parents[4] / "shared" / "data"))
NUM_EXAMPLES = 24
PAIRS = ["ultrafeedback_1000", "hh_harmless_1500", "gsm8k_solutions_1163", "arena_hard_500", "llamafactory_dpo_en_300"]
INSTRUCTIONS = ["sgd_multiturn_1500", "glaive_toolcall_300", "gsm8k_train_3000", "p3_flanlike_clear_5000"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def examples(name, longest=False):
    """Some rows of a file, drawn at random; the longest among them, if asked for."""
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    rows = load_dataset("json", data_files=str(path), split="train").to_list()
    drawn = random.Random(SEED).sample(rows, NUM_EXAMPLES)
    return Dataset.from_list(drawn + [max(rows, key=lambda row: len(str(row)))] * longest)


@pytest.fixture
def model_of(tmp_path):
    """A folder with a small model, and a tokenizer for some rows."""

    def save(dataset):
        tokenizer = make_tokenizer([str(row) for row in dataset])
        tokenizer.save_pretrained(tmp_path)
        make_model(tokenizer, **SIZES).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", PAIRS)
def test_preference_data(model_of, name):
    dataset = examples(f"pref/{name}", longest=True)
    model = model_of(dataset)
    compare("dpo", lambda: {"model": model}, dataset, max_length=256)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("per_turn", [False, True], ids=["whole", "one sample per turn"])
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instruction_data(model_of, name, per_turn):
    dataset = examples(f"sft/{name}", longest=True)
    options = {"max_length": 256}
    if per_turn:
        if "messages" not in dataset.column_names:
            pytest.skip("no conversations")
        dataset = split_turns(dataset)
        options["train_sampling_strategy"] = "sequential"
    model = model_of(dataset)
    counts = compare("sft", lambda: {"model": model}, dataset, **options).ours.trainer.total_counts()
    assert counts.distinct <= counts.computed <= counts.real
