"""Tries this package beside copies of TRL in which names have moved: run as a script, which imports all else once.

Each line of its input is a case, as JSON: the folder of the copy, what to do with it, and the file for what came of it.
"""

import json
import os
import re
import shutil
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

VERSION = "1.17.0"


def copy_of_trl(folder: Path, moved: str) -> Path:
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


def build(name: str, **options):
    """A trainer of this package, by the name of its task."""
    from datasets import Dataset
    from peft import LoraConfig

    import trl_paddingfree
    from tests.helpers.tiny import make_model, make_tokenizer, preference_data

    arguments = {"processing_class": make_tokenizer(), "train_dataset": preference_data(4, 0)}
    arguments["peft_config"] = LoraConfig(task_type="CAUSAL_LM")
    if name == "GRPO":
        arguments["train_dataset"] = Dataset.from_list([{"prompt": "w1 w2"}] * 4)
        arguments["reward_funcs"] = lambda completions, **kwargs: [1.0 for _ in completions]
        options |= {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2}
    common = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1}
    args = getattr(trl_paddingfree, f"PaddingFree{name}Config")("unused", **common, **options)
    return getattr(trl_paddingfree, f"PaddingFree{name}Trainer")(model=make_model(), args=args, **arguments)


def import_trainer():
    from trl_paddingfree import PaddingFreeKTOTrainer  # noqa: F401


def import_collator():
    from trl_paddingfree import PreferenceCollator  # noqa: F401


def import_core():
    from trl_paddingfree.trainers.online import OnlineTrainer  # noqa: F401


def train_dpo():
    build("DPO").train()


def train_within_a_budget():
    build("DPO", memory_budget=1).train()


def train_grpo():
    build("GRPO").train()


def train_what_fails_within_trl():
    from trl import DPOTrainer

    def fails(*args):
        raise KeyError("completion_mask")

    DPOTrainer._compute_loss = fails
    train_dpo()


def attempt(case: dict) -> None:
    """Do what a case asks for, in a process of its own, and write down what came of it."""
    sys.path.insert(0, case["folder"])
    said: dict = {"error": None}
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
    import torch
    from transformers import Trainer  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                attempt(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        os.waitpid(pid, 0)
        print("done", flush=True)
