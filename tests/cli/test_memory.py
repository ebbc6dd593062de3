"""The memory that `inspect` predicts from a shape is what the trainers count on the model itself."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_tokenizer
from tests.runs import run
from trl_paddingfree import BatchCounts
from trl_paddingfree.budgets import predict
from trl_paddingfree.budgets.features import KEYS, PAIRS
from trl_paddingfree.budgets.predict import features_by_layout, memory_report, model_config, step_units, training_needs
from trl_paddingfree.cli.main import main

# The head's weights, few layers, and adapters in another place
TOLERANCE = 0.1


def test_needs_of_a_shape_are_those_of_its_model():
    config = copy.deepcopy(model_config("tiny"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"peft_config": lora, "processing_class": make_tokenizer(), "memory_budget": 8, "bf16": True, "steps": 1}
    result = run("dpo", "ours", model=model, **options)
    measured, predicted = result.trainer.planner.needs, training_needs(config, "lora", 1, as_kernels=False)
    assert predicted.fixed == pytest.approx(measured.fixed, rel=TOLERANCE)
    load = features_by_layout([BatchCounts(computed=3000, real=4000, padded=6000, distinct=2900)])["shared"][0]
    measured = replace(measured, correction=1)  # `inspect` predicts kernels that pad nothing
    for ours, theirs in zip(predicted.saved(load), measured.saved(load), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_keys_cost_what_the_kernels_keep_of_them():
    """On CPUs, PyTorch keeps a head of keys once for each of its queries; its varlen kernel, once for all segments."""
    config = model_config("tiny")
    needs = training_needs(config, "lora", 1)
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert needs.per_feature.kept[:, [KEYS, PAIRS]] == pytest.approx(0, abs=1e-6)
    assert needs.per_feature.copied == pytest.approx(2 * 2 * heads, rel=1e-6)  # bfloat16, and values
    softcapped = training_needs(tiny_model("gemma2").config, "lora", 1)  # flash-attn has it, and keeps copies
    assert softcapped.per_feature.kept[:, KEYS].min() > softcapped.per_feature.copied == 0


@pytest.mark.parametrize("name", ["jamba", "lfm2"])  # the types of layers follow from their number, and are a list
def test_each_layer_needs_what_one_of_its_type_does(name):
    config = tiny_model(name).config
    needs = training_needs(config, "lora", 0)
    assert len(needs.per_feature.kept) == config.num_hidden_layers
    kinds = dict(zip(config.layer_types, needs.per_feature.kept.tolist(), strict=True))
    assert len(kinds) > 1
    assert needs.per_feature.kept.tolist() == [kinds[kind] for kind in config.layer_types]


def test_offloading_leaves_one_layer_and_what_is_on_its_way():
    needs = training_needs(model_config("tiny"), "lora", 1)
    short, long = features_by_layout([BatchCounts(n, n, n, n) for n in (1000, 100_000)])["padding_free"]
    for load in (short, long):
        (device, host), peaks = needs.offloaded(load), needs.peaks(load)
        assert needs.fixed < device < peaks[0]
        assert host == pytest.approx(needs.saved(load)[-1], rel=1e-6)  # all that waits between the passes
    many = replace(needs, per_feature=needs.per_feature.of(np.repeat(np.arange(len(needs.per_feature.kept)), 8)))
    assert many.offloaded(long)[0] == needs.offloaded(long)[0] < many.peaks(long)[-1]


def test_units_of_a_step():
    assert [step_units("dpo", "lora"), step_units("sft", "lora"), step_units("sft", "full")] == [3, 2, 3]


def test_more_memory_holds_more_and_recomputes_less():
    counts = [BatchCounts(computed=2000, real=3000, padded=5000, distinct=1900)] * 3
    small, large = (memory_report("dpo", {8: counts}, "tiny", "lora", gib)["sizes"][0] for gib in (0.3, 1000))
    for layout in ("padded", "padding_free", "shared"):
        assert 0 <= small[layout]["kept_batch"] <= small[layout]["recomputed_batch"] < large[layout]["kept_batch"]
        assert 1 <= small[layout]["speed_up"] <= large[layout]["speed_up"] == pytest.approx(4 / 3)
        assert small[layout]["recomputed_gib"] < small[layout]["kept_gib"]
    assert small["shared"]["kept_gib"] < small["padding_free"]["kept_gib"] < small["padded"]["kept_gib"]


def test_a_bar_shows_what_is_predicted(monkeypatch, capsys):
    monkeypatch.setattr(predict, "tqdm", partial(tqdm, disable=False))
    predict.memory_report("dpo", {2: [BatchCounts(60, 80, 100, 58)]}, "tiny", "lora", None)
    said = capsys.readouterr().err
    assert "Memory of tiny" in said
    assert "making layers with random weights" in said


def test_inspect_predicts_memory(inspected, pairs_file, capsys, model_dir):
    memory = inspected(pairs_file, "--model", model_dir, "--memory_gib", "24")["memory"]
    assert [row["batch_size"] for row in memory["sizes"]][:2] == [8, 16]
    assert 0 < memory["sizes"][0]["shared"]["offloaded_gib"] < memory["sizes"][0]["shared"]["kept_gib"]
    (whole,) = inspected(pairs_file, "--batch_size", "9999", "--model", model_dir, "--memory_gib", "24")["memory"][
        "sizes"
    ]
    assert whole["batch_size"] == 30  # all pairs that there are: what fits is counted in their examples
    assert main(["inspect", pairs_file, "--tokenizer", model_dir, "--model", "tiny", "--memory_gib", "24"]) == 0
    _, printed = capsys.readouterr().out.split("Memory of tiny")
    assert "activation_offloading=True" in printed.replace("\n", " ")
    assert "…" not in printed  # all of it fits into a terminal
