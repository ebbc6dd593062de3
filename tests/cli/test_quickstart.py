"""The quick start, short: what it trains on, what it compares, and what it says."""

import inspect
import json
import mmap
import re
import textwrap
import time

import pytest
from rich.console import Console

from tests.helpers.tiny import conversations
from trl_paddingfree.cli.main import main
from trl_paddingfree.cli.quickstart import compare as quickstart
from trl_paddingfree.cli.quickstart import model as from_scratch
from trl_paddingfree.cli.quickstart.side_by_side import watch_memory

SHORT = ["--steps", "2", "--sft_steps", "2", "--batch_size", "4", "--max_length", "64"]


@pytest.fixture
def run(tmp_path, capsys):
    """Run the quick start; its exit code, its JSON, and the folder it wrote to."""

    def run(*argv):
        code = main(["quickstart", *SHORT, "--output_dir", str(tmp_path), "--json", *argv])
        return code, json.loads(capsys.readouterr().out), tmp_path

    return run


@pytest.fixture
def own(model_dir, pairs_file):
    return ["--model", model_dir, "--dataset_name", pairs_file]


def test_docstrings_of_the_standard_library_and_topics_of_help_answer_questions_about_them():
    answers = dict(from_scratch.questions())
    signature = f"json.dumps{inspect.signature(json.dumps)}"
    assert answers[f"What does this do?\n\ndef {signature}"] == inspect.getdoc(json.dumps)
    assert answers["What does this do?\n\nclass textwrap.TextWrapper"] == inspect.getdoc(textwrap.TextWrapper)
    assert answers["Explain “assert” in Python."].startswith('The "assert" statement')
    assert len(answers) > 1000
    assert not any("def test." in question or "site-packages" in question for question in answers)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_pair_is_the_own_answer_against_that_to_another_question(seed):
    own = dict(from_scratch.questions())
    pairs = from_scratch.preference_data(seed)
    assert len(pairs) == len(from_scratch.questions())
    questions, chosen, rejected = ([turns[0]["content"] for turns in column] for column in pairs.to_dict().values())
    known = sum(own[question] == answer for question, answer in zip(questions, chosen, strict=True))
    assert known / len(pairs) > 0.99  # a few functions are defined twice
    assert sorted(chosen) == sorted(rejected)
    assert sum(a == b for a, b in zip(chosen, rejected, strict=True)) / len(pairs) < 0.01
    assert from_scratch.preference_data(seed)[0] == pairs[0] != from_scratch.preference_data(seed + 1)[0]


def test_the_quick_start_finds_equal_losses_and_fewer_tokens(run):
    code, result, folder = run()
    assert code == 0
    assert result["task"] == "dpo"
    assert result["steps"] == 2
    assert result["equal"]
    assert 0 <= result["loss_difference"] < 1e-5
    assert result["first_loss"]["padding_free"] == pytest.approx(0.693147, abs=1e-4)  # log 2: nothing is trained yet
    assert result["last_loss"]["padding_free"] != result["first_loss"]["padding_free"]
    assert 0 < result["tokens_computed"]["padding_free"] < 0.8 * result["tokens_computed"]["trl_padded"]
    assert result["speed_up"] == result["seconds"]["trl_padded"] / result["seconds"]["padding_free"]
    core, wall = result["core_seconds"], result["seconds"]
    assert all(0 < core[name] <= 2 * wall[name] + 1 for name in core)  # one thread trains, and one watches memory
    assert result["method"] == "padding-free (segment, shared prefixes)"
    assert result["saved_by_padding_free"] > 0 < result["saved_by_sharing"]
    saved, tokens = result["saved_by_padding_free"] + result["saved_by_sharing"], result["tokens_computed"]
    assert saved == pytest.approx(1 - tokens["padding_free"] / tokens["trl_padded"])
    assert (folder / "chart.png").read_bytes()[:4] == b"\x89PNG"
    saved = json.loads((folder / "result.json").read_text())
    assert saved == result
    assert (folder / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--use_peft"]], ids=["full", "lora"])
def test_your_own_model_and_pairs_take_their_place(run, tmp_path, own, lora):
    code, result, _ = run(*own, *lora)
    assert code == 0
    assert result["equal"]
    assert not (tmp_path / "model").exists()


def test_instructions_are_compared_in_sft(run, tmp_path):
    conversations(12, 1).to_json(tmp_path / "rows.jsonl")
    code, result, _ = run("--dataset_name", str(tmp_path / "rows.jsonl"))
    assert code == 0
    assert result["task"] == "sft"
    assert result["equal"]
    assert result["tokens_computed"]["padding_free"] < result["tokens_computed"]["trl_padded"]


def test_losses_that_differ_exit_1(run, monkeypatch, own):
    monkeypatch.setattr(quickstart, "FLOAT32_TOLERANCE", -1.0)
    code, result, _ = run(*own)
    assert code == 1
    assert not result["equal"]


def test_the_table_says_what_is_less_and_what_is_more(capsys, tmp_path, own):
    assert main(["quickstart", *SHORT, *own, "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "DPO, 2 steps on the same batches" in printed
    for row in ("first loss", "last loss", "time", "CPU time", "tokens computed", "peak memory"):
        assert row in printed
    for run in ("run 1 of 2: DPO, padding-free", "run 2 of 2: DPO, TRL, padded"):
        assert run in printed
    assert "% less" in printed
    assert re.search(r"\d+% are padding, and \d+% repeat the start of another row", " ".join(printed.split()))


@pytest.mark.parametrize(("padded", "ours", "verdict"), [(0.01, 0.1, "too little to tell"), (1.0, 0.5, "50% less")])
def test_memory_is_judged_above_noise_only(capsys, padded, ours, verdict):
    both = {"trl_padded": 2.0, "padding_free": 1.0}
    names = ("first_loss", "last_loss", "seconds", "core_seconds", "tokens_computed")
    figures = {"loss_difference": 0.0, "saved_by_padding_free": 0.3, "saved_by_sharing": 0.2}
    memory = {"peak_memory_gib": {"trl_padded": padded, "padding_free": ours}, "memory_noise_gib": 0.1}
    summary = {"task": "dpo", "steps": 2, "method": "m", **dict.fromkeys(names, both), **figures, **memory}
    summary["tokens_computed"] = {"trl_padded": 2000, "padding_free": 1000}
    quickstart.print_summary(summary, Console())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "peak memory" in line]
    assert verdict in row
    assert ("%" in row) == ("%" in verdict)
    assert quickstart.tells_memory(summary) == ("%" in verdict)


def test_a_folder_of_its_own_is_ignored_by_git_and_one_of_yours_is_not(tmp_path, own, run):
    run(*own)
    assert not (tmp_path / ".gitignore").exists()
    run(*own, "--output_dir", str(tmp_path / "new"))
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_trained(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train_all", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    assert main(["quickstart", "--model", "org/name", "--output_dir", str(tmp_path / "file")]) == 2
    assert "is not a folder that can be written to" in capsys.readouterr().err


def test_memory_is_that_of_the_peak_above_the_start():
    size = 2**28
    with watch_memory() as memory:
        block = mmap.mmap(-1, size)  # not of what an allocator has kept
        block[:: 2**12] = b"x" * len(block[:: 2**12])  # memory counts once it is written to
        deadline = time.monotonic() + 10
        while memory() * 2**30 < 0.9 * size and time.monotonic() < deadline:
            time.sleep(0.01)  # until it was sampled, however busy the machine is
        block.close()
    assert 0.9 * size < memory() * 2**30 < 1.5 * size
