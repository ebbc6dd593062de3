"""The memory that `inspect` predicts from a shape is what the trainers count on the model itself."""

import copy
import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.helpers.equivalence import run
from tests.helpers.tiny import make_tokenizer, preference_data
from trl_paddingfree import BatchCounts, PaddingFreeDPOConfig, PaddingFreeDPOTrainer
from trl_paddingfree.benchmark.memory import loads, memory_report, model_config, step_units, training_needs
from trl_paddingfree.cli.main import main

# The head's weights, few layers, and adapters in another place
TOLERANCE = 0.1


def test_needs_of_a_shape_are_those_of_its_model():
    config = copy.deepcopy(model_config("tiny"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    kwargs = {"peft_config": lora, "processing_class": make_tokenizer()}
    options = {"memory_budget": 8, "bf16": True, "steps": 1, "trainer_kwargs": kwargs}
    result = run(
        PaddingFreeDPOTrainer, PaddingFreeDPOConfig, model=model, train_dataset=preference_data(8, 0), **options
    )
    measured, predicted = result.trainer.flat.memory.needs, training_needs(config, "lora", 1)
    assert predicted.fixed == pytest.approx(measured.fixed, rel=TOLERANCE)
    load = loads(BatchCounts(computed=3000, real=4000, padded=6000, distinct=2900))["shared"]
    for ours, theirs in zip(predicted.saved(load), measured.saved(load), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_units_of_a_step():
    assert [step_units("dpo", "lora"), step_units("sft", "lora"), step_units("sft", "full")] == [3, 2, 3]


def test_more_memory_holds_more_and_recomputes_less():
    counts = [BatchCounts(computed=2000, real=3000, padded=5000, distinct=1900)] * 3
    small, large = (memory_report("dpo", [(8, counts)], "tiny", "lora", gib)["sizes"][0] for gib in (0.3, 1000))
    for layout in ("padded", "padding_free", "shared"):
        assert 0 <= small[layout]["kept_batch"] <= small[layout]["recomputed_batch"] < large[layout]["kept_batch"]
        assert 1 <= small[layout]["speed_up"] <= large[layout]["speed_up"] == pytest.approx(4 / 3)
        assert small[layout]["recomputed_gib"] < small[layout]["kept_gib"]
    assert small["shared"]["kept_gib"] < small["padding_free"]["kept_gib"] < small["padded"]["kept_gib"]


def test_inspect_predicts_memory(tmp_path, capsys, model_dir):
    path = tmp_path / "pairs.jsonl"
    preference_data(30, seed=5).to_json(path)
    common = ["inspect", str(path), "--tokenizer", model_dir, "--plot", ""]
    assert main([*common, "--model", model_dir, "--memory_gib", "24", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [row["batch_size"] for row in memory["sizes"]][:2] == [8, 16]
    assert main([*common, "--model", "tiny"]) == 0
    assert "Memory of tiny" in capsys.readouterr().out
    assert main([*common, "--memory_gib", "24"]) == 2
