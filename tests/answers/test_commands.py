"""The commands read several answers per prompt: what `inspect` counts, and a training command."""

import json

import pytest
from datasets import Dataset

from tests.answers.runs import pairs_of, scored
from tests.answers.test_images import vision_answers
from tests.helpers.folders import needs
from tests.helpers.vision import make_vision
from tests.runs import make_trainer
from trl_paddingfree.cli.main import main
from trl_paddingfree.cli.train import main as train

PAIRS = {"all": {}, "best": {"answer_pairs": "best"}, "margin": {"min_score_margin": 1.0}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    scored(12, 3).to_json(file)
    return str(file)


@pytest.mark.parametrize("case", PAIRS)
def test_inspect_counts_the_pairs_of_prompts_and_the_tokens_of_one_and_of_all(case, data, model_dir, capsys):
    chosen = [f"--{name}={value}" for name, value in PAIRS[case].items()]
    given = ["inspect", data, "--tokenizer", model_dir, "--batch_size", "12", *chosen]
    assert main([*given, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)

    rows = Dataset.from_json(data)
    expected = pairs_of(rows, **PAIRS[case])
    trainer = make_trainer("dpo", "ours", model=model_dir, train_dataset=rows, **PAIRS[case])
    batch = trainer.data_collator([*trainer.train_dataset])
    counts, prompts = batch["flat_batch"].counts, len({*expected["of_prompt"]})
    assert figures["pairs_per_prompt"] == pytest.approx(len(expected) / prompts)
    assert figures["tokens_of_all_pairs_in_trl"] == pytest.approx(counts.real / prompts)
    assert figures["tokens_of_one_pair_in_trl"] == pytest.approx(counts.real / len(expected))
    assert figures["tokens_of_all_pairs"] == pytest.approx(counts.computed / prompts)

    assert main(given) == 0
    assert f"Pairs per prompt: {len(expected) / prompts:.1f}. Tokens per prompt:" in capsys.readouterr().out


def test_inspect_names_a_bad_row(model_dir, tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"prompt": "w1", "completions": [" w2", " w3"], "scores": [1.0]}) + "\n")
    assert main(["inspect", str(file), "--tokenizer", model_dir]) == 2
    assert "Row 0 of the inspected data: `scores` has 1 entries" in capsys.readouterr().err


def test_a_training_command_reads_answers_and_its_options_from_a_file(data, model_dir, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("answer_pairs: extremes\nmin_score_margin: 1\n")
    given = {"model_name_or_path": model_dir, "dataset_name": data, "output_dir": tmp_path / "out", "config": config}
    given |= {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "logging_steps": 1}
    train("dpo", [word for name, value in given.items() for word in (f"--{name}", str(value))])
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["log_history"][0]["flat/pairs"] == 2
    assert "prompts per second" in capsys.readouterr().out


@needs("images")
def test_inspect_says_that_it_does_not_count_images_of_several_answers(tmp_path, capsys):
    model, processor = make_vision("llava", 0)
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    vision_answers(4, 0).to_parquet(tmp_path / "answers.parquet")
    assert main(["inspect", str(tmp_path / "answers.parquet"), "--tokenizer", str(tmp_path)]) == 2
    assert "which `inspect` cannot count: to count it, give each pair a row" in capsys.readouterr().err
