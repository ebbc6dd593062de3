"""Tiny models, a tokenizer and data that need no network, shared by all tests."""

import gc
import os
import random
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRL_PADDINGFREE_CACHE"] = "off"  # tests change what a key cannot see
os.environ["OMP_NUM_THREADS"] = "1"  # models this small only wait for further threads, and longer on a busy machine
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed compiles with ninja

# One fresh seed per run of the suite, the same in all worker processes; set it to repeat a run
os.environ.setdefault("TRL_PADDINGFREE_SEED", str(int.from_bytes(os.urandom(2), "little")))

import datasets  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if os.environ.get("TRL_PADDINGFREE_DEVICE") == "pretend":
    from tests import pretend_device

    pretend_device.install()

datasets.disable_progress_bars()


class TellFailures:
    """Prints each failure as it comes, with the seed that repeats it: a run that is cut short has no summary."""

    def __init__(self, reporter):
        self.reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            command = f"{pytest_report_header()} python -m pytest '{report.nodeid}'"
            self.reporter.write_line(f"\n{command}  # {said[-1] if said else report.when}")


@pytest.hookimpl(trylast=True)  # when there is a reporter
def pytest_configure(config):
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):  # not in workers
        config.pluginmanager.register(TellFailures(reporter))


def pytest_report_header():
    return f"TRL_PADDINGFREE_SEED={os.environ['TRL_PADDINGFREE_SEED']}"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            cases[item.path, item.originalname, *mark.args].append(item)
        if "trl_1" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings("default:.*will be removed in v2.0.0:FutureWarning"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    seed = os.environ["TRL_PADDINGFREE_SEED"]
    for (path, name, number), of_test in cases.items():
        for item in random.Random(f"{seed} {path.name} {name}").sample(of_test, max(len(of_test) - number, 0)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tokenizer():
    from tests.helpers.tiny import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tokenizer, tmp_path_factory):
    """A folder with a tiny Llama and its tokenizer, as a user would name one."""
    from tests.helpers.tiny import make_model, saved

    return saved(tmp_path_factory.mktemp("tiny-llama"), make_model(vocab_size=len(tokenizer)), tokenizer)


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory):
    """A folder with a tiny LLaVA and its processor."""
    from tests.helpers.tiny import saved
    from tests.helpers.vision import make_vision

    return saved(tmp_path_factory.mktemp("tiny-llava"), *make_vision("llava"))


@pytest.fixture(scope="module")
def checkout_stays():
    """The tests of a module leave no files in the checkout; nothing to see in an installed package."""
    from tests.helpers.pages import changed_files

    before = changed_files()
    yield
    assert changed_files() == before


@pytest.fixture
def passes(monkeypatch):
    """The passes under a budget, as [`tests.helpers.memory.watch_passes`] gives them."""
    from tests.helpers.memory import watch_passes

    return watch_passes(monkeypatch)


@pytest.fixture
def flat_passes(monkeypatch):
    """A mock of the function that computes flat batches, called as often as it was since the start-up check."""
    from trl_paddingfree.core.model import flat_model
    from trl_paddingfree.core.trainers.proving import StartUpCheck

    passes, prove_all = mock.Mock(wraps=flat_model.flat_forward), StartUpCheck.prove_all

    def and_forget(*args):
        route = prove_all(*args)
        passes.reset_mock()
        return route

    monkeypatch.setattr(flat_model, "flat_forward", passes)
    monkeypatch.setattr(StartUpCheck, "prove_all", and_forget)
    return passes


@pytest.fixture
def hold_tokens(monkeypatch):
    """A function that has memory budgets from now on hold so many tokens, once for each layer that keeps them."""
    from tests.helpers.memory import hold_tokens

    return partial(hold_tokens, monkeypatch)


def pytest_collection_finish():
    # Every run of a trainer collects garbage, and would look at all that was imported each time
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def untouched(monkeypatch):
    """A model that must not compute anything."""
    from tests.helpers.tiny import make_model

    model = make_model()
    model.config.num_labels = 1  # what TRL's reward trainer looks at first

    def forward(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(model.get_input_embeddings(), "forward", forward)
    return model
