"""The examples of the pages on any trainer and on packed rows run, and their tables are up to date."""

import re

import pytest
import transformers
from transformers import Trainer

from scripts.packed_table import HEADER, markdown, packed_page, row, verdicts, vision_row
from tests.helpers.architectures import MODEL_TYPES
from tests.helpers.pages import ROOT, blocks, short_and_local
from tests.helpers.tiny import conversations, preference_data
from trl_paddingfree import FlatModel

pytestmark = pytest.mark.usefixtures("checkout_stays")

ANY_TRAINER, PACKED = ((ROOT / "docs" / name).read_text() for name in ("any_trainer.md", "packed.md"))
TITLES = re.findall(r"## (.*)\n\n```python", ANY_TRAINER)
# Two that are exact, and of each kind of layer one that leaks
SOME = ("llama", "gemma3_text", "gpt_oss", "opt", "lfm2", "bamba", "qwen3_next")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("title", "example"), zip(TITLES, blocks(ANY_TRAINER, "python"), strict=True))
def test_the_examples_train_flat(title, example, monkeypatch, tmp_path, model_dir):
    data = {"trl-lib/ultrafeedback_binarized": preference_data(8, 0), "trl-lib/Capybara": conversations(8, 0)}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: data[name])
    names = {}
    exec(short_and_local(example, {"Qwen/Qwen3-0.6B": model_dir}, tmp_path), names)
    trained = names.get("trainer")
    if isinstance(trained, Trainer):
        assert trained.state.global_step == 1
    flat = FlatModel.of(trained.model if trained else names["model"])
    assert 0 < flat.counts.computed < 0.8 * flat.counts.padded
    assert not flat.padded.said
    assert f"\n| {title} | " in ANY_TRAINER, "run `python scripts/any_trainer.py`"


def test_the_check_of_a_framework_runs(model_dir, capsys):
    exec(blocks(PACKED, "python")[1].replace("Qwen/Qwen3-0.6B", model_dir), {})
    assert "packed by forward_of_a_framework: LEAKS" in capsys.readouterr().out


def test_the_reproducer_shows_that_trl_packs_some_models_wrongly(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    exec(blocks(PACKED, "python")[0], {})
    losses = dict(re.findall(r"(\w+, packed: \w+), loss ([\d.]+)", capsys.readouterr().out))
    assert losses["qwen3, packed: True"] == losses["qwen3, packed: False"]
    assert losses["gpt_oss, packed: True"] != losses["gpt_oss, packed: False"]
    assert PACKED.startswith(HEADER.format(version=transformers.__version__))


def test_the_page_says_of_some_models_what_the_check_does():
    written = verdicts(PACKED)
    for name in SOME:
        assert written | verdicts(markdown([row(name)])) == written, name


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_text_that_trl_packs_on_vision_models_is_as_the_page_says(kind):
    pytest.importorskip("torchvision")
    *_, verdict, _, alone, packed = found = vision_row(kind)
    assert (alone == packed) == (verdict == "exact")
    written = verdicts(PACKED)
    assert written | verdicts(markdown([found])) == written


@pytest.mark.models
def test_the_table_of_packed_rows_is_up_to_date():
    now = verdicts(packed_page(MODEL_TYPES))
    assert verdicts(PACKED) == now, "run `python scripts/models.py --packed --output docs/packed.md`"
