"""Files of rows that the studies read."""

import pytest

from tests.helpers.tiny import conversations, preference_data, prompts


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The path of each, by what it holds."""
    folder = tmp_path_factory.mktemp("rows")
    pairs = preference_data(24, 3).filter(lambda row: row["chosen"] != row["rejected"])
    made = {"pairs": pairs, "prompts": prompts(16, 3), "conversations": conversations(8, 3)}
    for name, rows in made.items():
        rows.to_json(folder / f"{name}.jsonl")
    return {name: str(folder / f"{name}.jsonl") for name in made}
