"""The page on the house of the code: its tables hold, and the capability that it adds runs in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys

from tests.helpers.pages import ROOT, blocks
from tests.test_house import PACKAGE

PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
# Trains beside padded TRL, and counts the rows of each shared token by where the tokens of rows are
TRAINS = """
from functools import partial
import numpy as np
from tests.helpers.tiny import DATA, SEED, arguments
from tests.runs import compare
from trl_paddingfree import PaddingFreeDPOTrainer

seen = []
class Watched(PaddingFreeDPOTrainer):
    part_sizes = PaddingFreeDPOTrainer.part_sizes
    def training_step(self, model, inputs, *args, **kwargs):
        batch = inputs["flat_batch"]
        seen.append(np.unique(batch.row_index[batch.row_mask], return_counts=True)[1])
        return super().training_step(model, inputs, *args, **kwargs)

ours = {"log_reuse": True, "trainer_class": Watched}
data = DATA["dpo"](12, SEED)
log = compare("dpo", partial(arguments, "dpo"), data, "shared", ours=ours, steps=2).ours.log_history
logged = [entry["flat/rows_of_shared_token"] for entry in log if "loss" in entry]
counted = [numbers[numbers > 1].mean() for numbers in seen]
assert len(logged) == 2 and min(logged) >= 2
np.testing.assert_allclose(logged, counted)
log = compare("dpo", partial(arguments, "dpo"), data, "shared", steps=1).ours.log_history
assert not any("flat/rows_of_shared_token" in entry for entry in log)
"""


def cells(head):
    """The rows of the table whose first heading is `head`, with words in code style bare."""
    (found,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found.splitlines()]


def test_the_page_has_each_folder_and_each_seam_where_it_stands():
    folders = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
    assert [folder.strip("`/ ") for folder, _ in cells("folder")] == folders
    for names, files, *_, users in cells("seam"):
        (file,) = re.findall(r"[\w/]+\.py", files)
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(?:Runtime\.)?(\w+)`", names):
            assert re.search(rf"\b{name}\b", source), name
        assert {*re.findall(r"`(\w+)`", users)} <= {*folders}


def test_the_pages_capability_runs_in_a_copy_of_the_package(tmp_path):
    copy = tmp_path / "trl_paddingfree"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    folder = copy / "reuse"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""How many rows use a shared token."""\n')
    named = re.findall(r"`trl_paddingfree/reuse/(\w+\.py)`", PAGE)
    code = blocks(PAGE, "python")
    assert sum(len(block.splitlines()) for block in code) < 100
    for name, block in zip(named, code, strict=True):
        (folder / name).write_text(block)
    order = copy / "capabilities.py"
    order.write_text(order.read_text().replace("ORDER = (", 'ORDER = ("reuse", '))
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    subprocess.run([sys.executable, "-c", TRAINS], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
