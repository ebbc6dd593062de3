"""Tries this package beside copies of TRL in which names have moved: run as a script, which imports all else once.

Each line of its input is a case, as JSON: the folder of the copy, what to do with it, and the file for what came of it.
"""

import json
import multiprocessing
import re
import shutil
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

VERSION = "1.17.0"


def copy_of_trl(folder, moved):
    """A folder with the installed TRL, called version 1.17, in which `moved` has another name throughout."""
    (source,) = find_spec("trl").submodule_search_locations
    shutil.copytree(source, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / "trl").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(rf"\b{moved}\b", f"{moved}_elsewhere", text), encoding="utf-8")
    metadata = distribution("trl").read_text("METADATA")
    (folder / f"trl-{VERSION}.dist-info").mkdir()
    renamed = re.sub("(?m)^Version: .*$", f"Version: {VERSION}", metadata, count=1)
    (folder / f"trl-{VERSION}.dist-info" / "METADATA").write_text(renamed, encoding="utf-8")
    return folder


def build(name, **options):
    """A trainer of this package, by the name of its task."""
    from tests.runs import make_trainer

    return make_trainer(name, "ours", steps=1, **options)


def import_trainer():
    from trl_paddingfree.registry import TRAINERS  # noqa: F401 (no module imports all of them otherwise)


def import_collator():
    from trl_paddingfree import PreferenceCollator  # noqa: F401


def train_dpo():
    build("dpo").train()


def train_within_a_budget():
    build("dpo", memory_budget=1).train()


def train_grpo():
    build("grpo").train()


def train_what_fails_within_trl():
    from trl import DPOTrainer

    def fails(*args):
        raise KeyError("completion_mask")

    DPOTrainer._compute_loss = fails
    train_dpo()


def attempt(case):
    """Do what a case asks for, in a process of its own, and write down what came of it."""
    sys.path.insert(0, case["folder"])
    said = {"error": None}
    try:
        globals()[case["does"]]()
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        said = {"error": type(error).__name__, "message": str(error), "notes": notes}
    import trl

    said["from"] = str(trl.__file__)
    Path(case["answer"]).write_text(json.dumps(said))


if __name__ == "__main__":
    import datasets  # noqa: F401
    import peft  # noqa: F401
    from transformers import Trainer  # noqa: F401

    forking = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = forking.Process(target=attempt, args=(json.loads(line),))
        process.start()
        process.join()
        print("done", flush=True)
