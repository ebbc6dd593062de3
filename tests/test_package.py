"""The package as it is installed: what it exports, and what importing it does."""

import ast
import importlib
import json
import pkgutil
import re
import shutil
import sys
from pathlib import Path

import pytest

import trl_paddingfree
from tests.helpers.launching import finished
from tests.test_house import FILES, PACKAGE
from trl_paddingfree.core.versions import TESTED

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trl_paddingfree.__path__, "trl_paddingfree.")
    if not module.name.endswith("__main__")
)


def in_a_fresh_process(code, *arguments):
    """What `code` prints, in a Python that has imported nothing yet."""
    return finished([sys.executable, "-c", code, *arguments], 300).stdout


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, trl_paddingfree; print(trl_paddingfree.__version__); print(*sys.modules)"
    version, modules = in_a_fresh_process(code).splitlines()
    assert version == trl_paddingfree.__version__
    imported = {name.partition(".")[0] for name in modules.split()}
    assert not imported & {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "bitsandbytes"}


# What our modules could change in others' by accident: registries, and the classes that are patched most often
STATE = """
import importlib, json, pkgutil, sys
import torch, transformers, trl, peft, accelerate
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, Trainer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.llama import modeling_llama
from trl.trainer import dpo_trainer, sft_trainer, utils

WATCHED = [PreTrainedModel, Trainer, modeling_llama, modeling_llama.LlamaForCausalLM, modeling_llama.LlamaAttention,
           trl.DPOTrainer, trl.SFTTrainer, dpo_trainer, sft_trainer, utils, torch.nn.functional, peft.PeftModel,
           accelerate.Accelerator, torch.Tensor]

def state():
    return {
        "attention": sorted(AttentionInterface().keys()),
        "masks": sorted(AttentionMaskInterface().keys()),
        "losses": sorted(LOSS_MAPPING),
        "members": [{name: id(value) for name, value in vars(x).items() if callable(value)} for x in WATCHED],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.is_initialized(),
    }

before = state()
import trl_paddingfree
for name in sys.argv[1:]:
    importlib.import_module(name)
for name in trl_paddingfree.__all__:
    getattr(trl_paddingfree, name)
after = state()
print(json.dumps([key for key in before if before[key] != after[key]]))
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing_in_transformers_and_trl():
    assert json.loads(in_a_fresh_process(STATE, *MODULES).splitlines()[-1]) == []


# What `padding_free` and `check_packed` are made of
ALONE = (
    *("core.flat", "core.model", "core.check", "core.upstream", "core.versions", "padded", "recomputable"),
    *("anywhere", "packed", "compiled.layers"),
)
DOORS = [name for name in MODULES if name.removeprefix("trl_paddingfree.").startswith(ALONE)]


def test_what_works_without_trl_does_not_import_it():
    code = f"""
import importlib, sys
for name in {DOORS}:
    importlib.import_module(name)
    print(name, *{{"trl", "flash_attn"}} & sys.modules.keys())
"""
    assert in_a_fresh_process(code).splitlines() == DOORS


WITHOUT_TRL = """
import copy, sys
missing = ["trl", "peft", "accelerate", "datasets"]
sys.modules.update(dict.fromkeys(missing))  # as if they were not installed
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import trl_paddingfree

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.2, **sizes))
padded = copy.deepcopy(model)
print(trl_paddingfree.check_packed(model, documents=3, length=64).verdict)
assert trl_paddingfree.padding_free(model) is model
ids, mask = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
losses = [
    each(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss for each in (model, padded)
]
for loss in losses:
    loss.backward()
torch.testing.assert_close(*losses)
for one, other in zip(model.parameters(), padded.parameters(), strict=True):
    torch.testing.assert_close(one.grad, other.grad)
print(trl_paddingfree.FlatModel.of(model).counts)
for name in ("PaddingFreeDPOTrainer", "PaddingFreeGRPOConfig", "PreferenceCollator"):
    try:
        getattr(trl_paddingfree, name)
    except ImportError as error:
        assert f'Run `pip install "trl>={sys.argv[1]}" "peft>=' in str(error), error
        print(name)
print(*(name for name in missing if sys.modules[name] is not None))
"""


def test_without_trl_models_are_computed_flat_and_packed_rows_checked():
    """Nor is anything else there that TRL would bring. Trainers say what to install."""
    said = in_a_fresh_process(WITHOUT_TRL, TESTED["trl"][0]).splitlines()
    counts = "BatchCounts(computed=6, real=7, padded=8, distinct=5, repeated=1)"
    assert said == ["exact", counts, "PaddingFreeDPOTrainer", "PaddingFreeGRPOConfig", "PreferenceCollator", ""]


@pytest.mark.slow
def test_only_building_a_trainer_registers_attention(tokenizer, tmp_path):
    # In a process of its own: other tests have registered theirs
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from transformers import AttentionInterface
from tests.helpers.tiny import make_model, make_tokenizer, preference_data
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
from peft import LoraConfig
names = set(AttentionInterface().keys())
for padding_free in (False, True):
    options = dict(bf16=False, report_to="none", use_cpu=True, padding_free=padding_free)
    args = PaddingFreeDPOConfig({str(tmp_path)!r}, **options)
    PaddingFreeDPOTrainer(make_model(), args=args, train_dataset=preference_data(4, 0),
                          processing_class=make_tokenizer(), peft_config=LoraConfig())
    print([getattr(name, "key", name) for name in set(AttentionInterface().keys()) - names])
"""
    padded, flat = in_a_fresh_process(code).splitlines()[-2:]
    assert padded == "[]"
    assert flat == "[('sdpa', 'segment')]"


def test_the_exports_are_the_public_names_for_type_checkers_too():
    assert set(trl_paddingfree.__all__) == set(dir(trl_paddingfree))
    for name in trl_paddingfree.__all__:
        value = getattr(trl_paddingfree, name)
        if name != "__version__":
            assert value.__name__ == name
            assert value.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        trl_paddingfree.no_such_name  # noqa: B018
    names = {}
    exec("from trl_paddingfree import *", names)
    assert set(trl_paddingfree.__all__) <= names.keys()
    assert (PACKAGE / "py.typed").exists()
    (for_checkers,) = (node for node in ast.parse(FILES["__init__.py"]).body if isinstance(node, ast.If))
    assert {alias.name: node.module for node in for_checkers.body for alias in node.names} == trl_paddingfree._EXPORTS


WITHOUT = """
import sys
sys.path.insert(0, sys.argv[1])
import trl_paddingfree
from trl_paddingfree.registry import TRAINERS
print(*TRAINERS)
print(*map(getattr, [trl_paddingfree] * 99, trl_paddingfree.__all__))
for name in sys.argv[2:]:
    for give in (lambda: getattr(trl_paddingfree, name), lambda: exec(f"from trl_paddingfree import {name}")):
        try:
            print(give())
        except ImportError as error:
            print(error)
try:
    TRAINERS["kto"]
except ImportError as error:
    print(error)
"""


def test_without_folders_their_names_say_so_and_all_others_are_there(tmp_path):
    gone = {name: path.split(".")[0] for name, path in trl_paddingfree._EXPORTS.items() if not path.startswith("core.")}
    folders = sorted({*gone.values()})
    assert folders == ["anywhere", "cli", "heads", "online", "packed"]
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", *folders))
    tasks, names, *errors = in_a_fresh_process(WITHOUT, str(tmp_path), *gone).splitlines()
    assert tasks == "dpo sft"
    assert "PaddingFreeDPOTrainer" in names
    expected = {
        name: f"`{name}` needs the folder `{folder}` of trl_paddingfree, and this copy is without it."
        for name, folder in gone.items()
    }
    assert errors == [expected[name] for name in gone for _ in range(2)] + [expected["PaddingFreeKTOTrainer"]]


def test_modules_import_and_they_and_their_public_names_say_what_they_are():
    modules = {name: importlib.import_module(name) for name in MODULES}
    known = {name for module in modules.values() for name in vars(module)}
    silent, missing = [], []
    for name, module in modules.items():
        own = {x: value for x, value in vars(module).items() if getattr(value, "__module__", "") == name}
        public = [value for x, value in own.items() if not x.startswith("_") and callable(value)]
        silent += [each for each in (module, *public) if not each.__doc__]
        for tilde, referred in re.findall(r"\[`(~?)([\w.]+)`\]", Path(module.__file__).read_text()):
            if not (exists(referred) if tilde else referred.split(".")[0] in known):
                missing.append(f"{name}: {referred}")
    assert silent == missing == []


def exists(path):
    """Whether a dotted name leads to something."""
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True
