"""Files of rows that the studies read."""

import pytest

from tests.helpers.tiny import conversations, different_pairs, prompts


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The path of each, by what it holds."""
    folder = tmp_path_factory.mktemp("rows")
    made = {"pairs": different_pairs(24, 3), "prompts": prompts(16, 3), "conversations": conversations(8, 3)}
    for name, rows in made.items():
        rows.to_json(folder / f"{name}.jsonl")
    return {name: str(folder / f"{name}.jsonl") for name in made}
