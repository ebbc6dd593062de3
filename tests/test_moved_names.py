"""What a user sees when TRL has moved a name that this package takes: one error, which names it and the versions.

Each of these trained as if nothing were, or blamed something else, in version 0.3.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.pages import ROOT
from tests.moved_names import VERSION, copy_of_trl
from trl_paddingfree.cli.options import refuse
from trl_paddingfree.core import versions
from trl_paddingfree.core.versions import MovedNameError, naming_versions

# What was moved, what to do, and in what message it ends: where the name was, and who needs it
MOVED = {
    "get_config_model_id": ("import_trainer", "trl.trainer.utils", "trl_paddingfree.core.trainers.configs"),
    "DataCollatorForPreference": ("import_collator", "trl.trainer.dpo_trainer", "trl_paddingfree.core.data.collate"),
    "_prepare_dataset": ("import_trainer", "DPOTrainer", "PaddingFreeDPOTrainer"),
    "_generate_single_turn": ("import_trainer", "GRPOTrainer", "PaddingFreeGRPOTrainer"),
    "shift_labels": ("train_dpo", "trl.trainer.utils.add_fused_lm_head", "FlatModel"),
    "_metrics": ("train_within_a_budget", "DPOTrainer", "PaddingFreeDPOTrainer"),
    "_buffered_inputs": ("train_grpo", "GRPOTrainer", "PaddingFreeGRPOTrainer"),
}
FAST = ("_prepare_dataset", "shift_labels")


@pytest.fixture(scope="module")
def attempt(tmp_path_factory):
    """Tries a case beside a copy of TRL, and gives what came of it."""
    command = [sys.executable, "-m", "tests.moved_names"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as process:

        def run(does, moved):
            folder = tmp_path_factory.mktemp("trl")
            answer = folder / "answer.json"
            case = {"folder": str(copy_of_trl(folder, moved)), "does": does, "answer": str(answer)}
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            while "done" not in process.stdout.readline():  # among what is printed besides
                assert process.poll() is None
            said = json.loads(answer.read_text())
            assert Path(said["from"]).is_relative_to(folder)
            return said

        yield run
        process.stdin.close()


@pytest.mark.parametrize(
    "moved", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MOVED]
)
def test_a_name_that_trl_has_moved_ends_in_one_error(attempt, moved):
    does, place, user = MOVED[moved]
    said = attempt(does, moved)
    assert said["error"] == "MovedNameError", said
    lowest, newest = versions.TESTED["trl"]
    assert said["message"].startswith(f"`{place}` has no `{moved}`, which `{user}` needs. ")
    assert (
        f"Installed: trl {VERSION} (tested: {lowest if lowest == newest else f'{lowest} to {newest}'})"
        in said["message"]
    )
    assert said["notes"] == []


@pytest.mark.slow
def test_a_version_that_is_not_tested_is_named_with_errors_only(attempt):
    assert attempt("train_dpo", "no_such_name")["error"] is None
    said = attempt("train_what_fails_within_trl", "no_such_name")
    assert (said["error"], said["message"]) == ("KeyError", "'completion_mask'")
    (note,) = said["notes"]
    assert f"trl {VERSION} (tested: " in note


def failing(error):
    with naming_versions(), naming_versions():
        raise error


def notes_of(error, **tested):
    with mock.patch.object(versions, "TESTED", tested), pytest.raises(type(error)) as raised:
        failing(error)
    assert raised.value is error
    return getattr(error, "__notes__", [])


def test_errors_name_the_versions_that_are_not_tested_and_only_those():
    installed = versions._version("trl")
    assert notes_of(KeyError("a"), trl=(installed, installed)) == []
    assert notes_of(ValueError("a"), trl=("1", "99")) == []
    expected = f"Installed: trl {installed} (tested: 98 to 99)."
    assert notes_of(KeyError("a"), trl=("98", "99"), torch=("1", "99")) == [
        f"This may be a matter of versions. {expected}"
    ]
    (note,) = notes_of(KeyError("a"), no_such_package=("1", "2"))
    assert "no_such_package of unknown version (tested: 1 to 2)" in note


def test_refusals_of_ours_are_no_matter_of_versions():
    with mock.patch.object(versions, "TESTED", {"trl": ("98", "99")}), pytest.raises(ValueError, match="a") as raised:
        exec("with naming_versions(): raise ValueError('a')", {**globals(), "__name__": "trl_paddingfree.x"})
    assert not hasattr(raised.value, "__notes__")


def test_commands_print_the_note(capsys):
    error = OSError("no such file")
    error.add_note("Installed: so and so.")
    refuse("dpo", error)
    assert capsys.readouterr().err == "trl-paddingfree dpo: no such file\nInstalled: so and so.\n"


def test_builds_of_a_tested_version_are_tested():
    with mock.patch.object(versions, "_version", return_value="2.11.0+cu130"):
        assert "torch" not in versions.untested()


@pytest.mark.parametrize("statement", ["from trl import no_such_name", "import trl.no_such_name"])
def test_an_import_of_ours_is_named_and_one_of_the_users_is_not(statement):
    with (
        pytest.raises(MovedNameError, match=r"^`trl` has no `no_such_name`, which `trl_paddingfree.x` needs"),
        naming_versions(),
    ):
        exec(statement, {"__name__": "trl_paddingfree.x"})
    with pytest.raises(ImportError, match="no_such_name") as raised, naming_versions():
        exec(statement, {"__name__": "my_rewards"})
    assert not isinstance(raised.value, MovedNameError)


def test_a_package_that_is_missing_is_not_called_moved():
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"), naming_versions():
        exec("import no_such_package", {"__name__": "trl_paddingfree.x"})
