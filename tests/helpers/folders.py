"""Tests of the core that ask for a capability are skipped where its folder was deleted: see `scripts/without.py`."""

from collections.abc import Mapping
from typing import Any

import pytest

from trl_paddingfree.capabilities import is_there

# Folders that a run of a task, or with an option, asks for
OF_TASK = {
    **dict.fromkeys(("kto", "reward"), "heads"),
    **dict.fromkeys(("grpo", "rloo", "distillation"), "online"),
}
OF_OPTION = {
    "memory_budget": "budgets",
    "max_tokens_per_micro_batch": "budgets",
    "arrange_micro_batches": "arranging",
    "sequence_parallel_size": "groups",
}


def missing(*folders: str) -> str:
    """Why a test that needs `folders` is skipped; empty if all are there."""
    gone = [folder for folder in folders if not is_there(folder)]
    return f"without the folder {', '.join(gone)}" if gone else ""


def needs(*folders: str) -> pytest.MarkDecorator:
    """A mark for tests, or cases of a table, that need these folders."""
    return pytest.mark.skipif(bool(missing(*folders)), reason=missing(*folders))


STATES = needs("recurrent")  # of tests whose models have layers that carry states


def skip_without(task: str, options: Mapping[str, Any]) -> None:
    """Skip the test that is running if a run of a `task` with these options needs a folder that is not there."""
    asked = {OF_OPTION[name] for name in options.keys() & OF_OPTION if options[name] not in (None, 1, "none")}
    named = asked | ({OF_TASK[task]} if task in OF_TASK else set())
    if reason := missing(*sorted(named)):
        pytest.skip(reason)
