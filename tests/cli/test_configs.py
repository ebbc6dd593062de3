"""Every file in configs/ is understood by the command in its first line."""

import re

import pytest
import yaml

from tests.helpers.pages import ROOT
from trl_paddingfree.cli.train import make_parser

FILES = sorted(ROOT.glob("configs/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_training_configs_parse(file):
    command = file.read_text().splitlines()[0]
    assert str(file.relative_to(ROOT)) in command
    task = re.search(r"scripts/(\w+)\.py", command).group(1)
    # bf16 needs a GPU to be parsed: what is checked here is the names and types of the rest
    script, args, model, *_ = make_parser(task).parse_args_and_config(["--config", str(file), "--bf16", "false"])
    values = yaml.safe_load(file.read_text())
    assert args.padding_free
    for name, value in values.items():
        parsed = next(getattr(part, name) for part in (args, model, script) if hasattr(part, name))
        if name not in ("bf16", "report_to"):
            assert parsed == value or str(parsed) == str(value) or name == "optim", name


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/accelerate/*.yaml")), ids=lambda f: f.stem)
def test_accelerate_configs_load(file):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(file)).num_processes == 8
    assert file.stem in file.read_text().splitlines()[0]
