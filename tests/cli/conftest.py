"""A file of pairs, and what `inspect` says of a file."""

import json

import pytest

from tests.helpers.tiny import preference_data


@pytest.fixture(scope="module", autouse=True)
def commands_leave_no_files(checkout_stays):
    """Commands write where they are told to."""


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    preference_data(30, seed=5).to_json(path)
    return str(path)


@pytest.fixture
def launched(monkeypatch):
    """The arguments that `accelerate launch` would run with."""
    found = []
    for name in ("refuse_unreachable", "refuse_unreachable_data"):
        monkeypatch.setattr(f"trl_paddingfree.cli.train.{name}", lambda name, what, revision=None: None)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", found.append)
    return found


@pytest.fixture
def inspected(capsys, model_dir):
    """Run `inspect` on a file; the JSON that it prints, which must be all that it prints."""
    from trl_paddingfree.cli.main import main

    def inspect(file, *options, tokenizer=model_dir):
        capsys.readouterr()
        assert main(["inspect", str(file), "--tokenizer", tokenizer, *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return inspect
