"""The package as it is installed: what it exports, and what importing it does."""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_paddingfree

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(trl_paddingfree.__path__, "trl_paddingfree.")
    if not module.name.endswith("__main__")
)


def in_a_fresh_process(code: str) -> str:
    """What `code` prints, in a Python that has imported nothing yet."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


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
    result = subprocess.run(
        [sys.executable, "-c", STATE, *MODULES], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(result.stdout.splitlines()[-1]) == []


# Which parts of the package each part may import. An arrow that is not here would point up, or around
MAY_IMPORT: dict[str, set[str]] = {
    "flat": set(),
    "versions": set(),
    "upstream": {"versions"},
    "model": {"flat", "upstream", "versions"},
    "memory": {"flat", "upstream", "model"},
    "check": {"flat", "upstream", "model"},
    "data": {"flat"},
    "images": {"flat", "model", "check", "data"},
    "trainers": {"flat", "upstream", "versions", "model", "memory", "check", "data", "images"},
    "quickstart": {"data", "memory", "trainers"},
    "cli": {
        *("flat", "upstream", "versions", "model", "memory", "check", "data", "images", "trainers"),
        "quickstart",
    },
    "__main__": {"cli"},
    "__init__": {"flat", "versions", "model", "check", "data", "trainers"},
}


def part_of(path: str) -> str:
    return path.split(".")[0]


def imported_parts(file: Path) -> set[str]:
    """Parts of the package that a file imports, also inside functions, but for type annotations."""
    package = Path(trl_paddingfree.__file__).parent
    folder, parts = file.relative_to(package).parent.parts, set()
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    typed = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in set(nodes) - {child for each in typed for child in ast.walk(each)}:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            parts |= {part_of(".".join((*base, name))) for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_paddingfree."):
            parts.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("trl_paddingfree.")}
    return parts - {"__version__"}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below_it(part):
    package = Path(trl_paddingfree.__file__).parent
    files = [*package.glob(f"{part}.py"), *package.glob(f"{part}/**/*.py")]
    assert files
    upward = {str(file.relative_to(package)): imported_parts(file) - MAY_IMPORT[part] - {part} for file in files}
    assert {file: parts for file, parts in upward.items() if parts} == {}


def test_no_two_parts_import_each_other_by_any_way():
    above = dict(MAY_IMPORT)
    while free := [part for part, below in above.items() if not below & above.keys()]:
        above = {part: below for part, below in above.items() if part not in free}
    assert not above


def runs(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes within one that run at some time: not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "not TYPE_CHECKING"):
            children = child.orelse if isinstance(child.test, ast.Name) else child.body
            yield from (each for one in children for each in (one, *runs(one)))
        else:
            yield child
            yield from runs(child)


def imported_files(file: Path) -> set[Path]:
    """Files of the package that a file imports, also inside functions."""
    package, found = Path(trl_paddingfree.__file__).parent, set[Path]()
    for node in runs(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith(package.name)):
            continue
        folder = [package.parent, *[file, *file.parents][1 : node.level + 1]][-1 if node.level else 0]
        base = folder.joinpath(*(node.module or "").split("."))
        names = [base / alias.name for alias in node.names] if base.is_dir() else [base]
        found |= {path.with_suffix(".py") for path in names if path.with_suffix(".py").is_file()}
    return found


def circles(below: dict[Path, set[Path]]) -> list[list[str]]:
    """The files of each circle, by the files that each imports."""
    reached = {file: set(files) for file, files in below.items()}
    for via in reached:  # Warshall's way to all that is reached by any way
        for files in reached.values():
            if via in files:
                files |= reached[via]
    package = Path(trl_paddingfree.__file__).parent
    found = {frozenset(other for other in files if file in reached[other]) for file, files in reached.items()}
    return sorted(sorted(str(file.relative_to(package)) for file in circle) for circle in found if circle)


def test_circles_of_files_are_found():
    package = Path(trl_paddingfree.__file__).parent
    a, b, c, d = (package / f"{name}.py" for name in "abcd")
    assert circles({a: {b}, b: {c}, c: {b, d}, d: set()}) == [["b.py", "c.py"]]
    assert package / "upstream.py" in imported_files(package / "model" / "routes.py")
    assert package / "model" / "forward.py" in imported_files(package / "check" / "probe.py")
    assert package / "trainers" / "base.py" not in imported_files(package / "trainers" / "steps.py")  # a type only


def test_no_files_import_each_other_by_any_way():
    package = Path(trl_paddingfree.__file__).parent
    assert circles({file: imported_files(file) for file in package.rglob("*.py")}) == []


def test_the_package_has_few_parts_and_each_is_listed():
    package = Path(trl_paddingfree.__file__).parent
    entries = sorted(path.name for path in package.iterdir() if path.name != "__pycache__")
    assert len(entries) <= 14
    assert {name.removesuffix(".py") for name in entries} - {"py.typed"} == MAY_IMPORT.keys()


CORE = [name for name in MODULES if name.split(".")[1] in ("flat", "model", "memory", "upstream", "versions")]


def test_the_core_needs_neither_trl_nor_flash_attn():
    code = f"""
import importlib, sys
for name in {CORE}:
    importlib.import_module(name)
    print(name, *{{"trl", "flash_attn"}} & sys.modules.keys())
"""
    assert in_a_fresh_process(code).splitlines() == CORE


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


def test_the_exports_are_the_public_names():
    assert set(trl_paddingfree.__all__) == set(dir(trl_paddingfree))
    for name in trl_paddingfree.__all__:
        value = getattr(trl_paddingfree, name)
        if name != "__version__":
            assert value.__name__ == name
            assert value.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        trl_paddingfree.no_such_name  # noqa: B018


def test_the_names_for_type_checkers_are_the_exports():
    tree = ast.parse(Path(trl_paddingfree.__file__).read_text())
    (for_checkers,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in for_checkers.body for alias in node.names}
    assert imported == trl_paddingfree._EXPORTS


def test_star_import_gives_the_exports():
    names = {}
    exec("from trl_paddingfree import *", names)
    assert set(trl_paddingfree.__all__) <= names.keys()


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_and_says_what_it_is(name):
    assert importlib.import_module(name).__doc__


def exists(path: str) -> bool:
    """Whether a dotted name leads to something."""
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def test_names_that_docstrings_refer_to_exist():
    modules = [importlib.import_module(name) for name in MODULES]
    known = {name for module in modules for name in vars(module)}
    missing = []
    for module in modules:
        for tilde, name in re.findall(r"\[`(~?)([\w.]+)`\]", Path(module.__file__).read_text()):
            if not (exists(name) if tilde else name.split(".")[0] in known):
                missing.append(f"{module.__name__}: {name}")
    assert missing == []


def test_the_package_says_that_it_is_typed():
    assert (Path(trl_paddingfree.__file__).parent / "py.typed").exists()
