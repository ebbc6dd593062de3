"""The structure of the package: who imports whom, no circles, and what a plain step enters."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import trl_paddingfree
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.tiny import DATA, make_model
from tests.runs import make_trainer
from trl_paddingfree.capabilities import classes_of
from trl_paddingfree.core.trainers.collated import Collated
from trl_paddingfree.core.trainers.composed import CollatedTrainer
from trl_paddingfree.core.trainers.configs import ComposedOptions
from trl_paddingfree.online.base import Online
from trl_paddingfree.online.composed import OnlineTrainer
from trl_paddingfree.registry import TRAINERS

PACKAGE = Path(trl_paddingfree.__file__).parent  # it may be installed elsewhere
FILES = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}

# What each part of the core may import. An arrow that is not here would point up, or around
CORE = {
    "core/versions": set(),
    "core/device": set(),
    "core/spelling": set(),
    "core/flat": set(),
    "core/upstream": {"core/versions"},
    "core/model": {"core/flat", "core/upstream", "core/versions"},
    "core/check": {"core/flat", "core/upstream", "core/model"},
    "core/data": {"core/flat"},
    "core/trainers": {
        "core/flat",
        "core/device",
        "core/spelling",
        "core/upstream",
        "core/versions",
        "core/model",
        "core/check",
        "core/data",
    },
}
# What may import capabilities: nothing else names one
DOORS = ("__init__", "__main__", "capabilities", "cli", "registry")
# Facts that several capabilities ask for, the core none, and that need nothing but the core
SHARED = {"coupling", "hub", "machine", "messages", "padded", "recomputable", "spans"}
IN_CIRCLES = 5  # files that import each other by any way, imports for annotations counted
ATTRIBUTES_OF_FLAT_MODEL = 14
CLASSES_ABOVE_A_TRAINER = 3  # between it and TRL's, but for those of capabilities
FUNCTIONS_OF_A_STEP, FILES_OF_A_STEP = 50, 14  # that a plain DPO step of two layers enters, all in the core


def runs(node: ast.AST):
    """All nodes within one that run at some time: not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "not TYPE_CHECKING"):
            children = child.orelse if isinstance(child.test, ast.Name) else child.body
            yield from (each for one in children for each in (one, *runs(one)))
        else:
            yield child
            yield from runs(child)


def imported_files(name: str, annotations: bool = False) -> set[str]:
    """Files of the package that a file imports, also inside functions; those for type checkers if asked for."""
    file, found = PACKAGE / name, set()
    for node in (ast.walk if annotations else runs)(ast.parse(FILES[name])):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE.name)):
            folder = file.parents[node.level - 1] if node.level else PACKAGE.parent
            base = folder.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                candidates = (base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py")
                found.add(str(next(x for x in candidates if x.is_file()).relative_to(PACKAGE)))
    return found - {"__init__.py"}


def in_circles(below: dict[str, set[str]]) -> list[str]:
    """The files that reach themselves, by the files that each imports."""
    reached = {file: set(files) for file, files in below.items()}
    for via in reached:  # Warshall's way to all that is reached by any way
        for files in reached.values():
            if via in files:
                files |= reached[via]
    return [file for file, files in reached.items() if file in files]


def part_of(name: str) -> str:
    """The folder of a file: within the core, one of its folders."""
    parts = name.removesuffix(".py").split("/")
    return "/".join(parts[:2]) if parts[0] == "core" else parts[0]


def test_the_core_imports_only_what_lies_below_it_and_nothing_but_doors_imports_capabilities():
    imported = {part: set() for part in map(part_of, FILES)}
    for name in FILES:
        imported[part_of(name)] |= {part_of(other) for other in imported_files(name)} - {part_of(name)}
    core = {"core/__init__", *CORE}
    assert {part for part in imported if part.startswith("core/")} == core
    assert {part: imported[part] & (core | SHARED) - CORE[part] for part in CORE} == dict.fromkeys(CORE, set())
    assert in_circles(CORE) == []
    assert {part: imported[part] - core - {"__init__"} for part in SHARED} == dict.fromkeys(SHARED, set())
    others = {part: imported[part] - core - SHARED - {"capabilities"} for part in imported if part not in DOORS}
    assert {part: names for part, names in others.items() if names} == {}


def test_files_import_each_other_by_no_way_and_by_few_for_annotations():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]
    assert "core/upstream.py" in imported_files("core/model/routes.py")
    assert "registry.py" in imported_files("cli/train.py")
    typed, untyped = (imported_files("core/model/forward.py", annotations=x) for x in (True, False))
    assert typed > untyped
    assert in_circles({name: imported_files(name) for name in FILES}) == []
    assert len(in_circles({name: imported_files(name, annotations=True) for name in FILES})) <= IN_CIRCLES


def test_a_flat_model_holds_little():
    assert len(vars(flat_model(make_model()))) <= ATTRIBUTES_OF_FLAT_MODEL


def test_few_classes_stand_between_a_trainer_and_trls():
    added = {cls for name in ("Collated", "Online") for each in classes_of("trainers", name) for cls in each.__mro__}
    own = {cls for base in (Collated, Online) for cls in base.__mro__}
    for trainer in TRAINERS.values():
        ours = [x for x in trainer.__mro__[1:] if x.__module__.startswith(PACKAGE.name) and x not in added - own]
        assert len(ours) <= CLASSES_ABOVE_A_TRAINER, trainer


@pytest.mark.parametrize("composed", [CollatedTrainer, OnlineTrainer, ComposedOptions])
def test_type_checkers_see_the_bases_that_capabilities_give(composed):
    file, names, found = Path(inspect.getfile(composed)), {}, []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = str(file.parents[node.level - 1].relative_to(PACKAGE.parent)).replace("/", ".")
            names |= {alias.asname or alias.name: f"{folder}.{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.ClassDef) and node.name == composed.__name__:
            found.append([names.get(ast.unparse(base)) for base in node.bases])
    static, _ = found
    assert static == [f"{base.__module__}.{base.__name__}" for base in composed.__bases__]


def calls_of_a_step(task: str, **options) -> list[tuple[str, str]]:
    """The functions of the package that the last of four steps enters, with their files; but for lambdas."""
    trainer = make_trainer(task, "shared", steps=4, train_dataset=DATA[task](32, 0), **options)
    training_step, steps = trainer.training_step, list[list[tuple[str, str]]]()

    def note(frame, event, _):
        code = frame.f_code
        name = code.co_qualname
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and name.rpartition(".")[2][0] != "<":
            steps[-1].append((name, str(Path(code.co_filename).relative_to(PACKAGE))))

    def watched(*args, **kwargs):
        before = sys.getprofile()
        steps.append([])
        sys.setprofile(note)
        try:
            return training_step(*args, **kwargs)
        finally:
            sys.setprofile(before)

    trainer.training_step = watched
    trainer.train()
    return steps[-1]


def test_a_plain_step_enters_few_functions():
    called = calls_of_a_step("dpo", gradient_checkpointing=True)
    files = {file for _, file in called}
    assert len({*called}) <= FUNCTIONS_OF_A_STEP, called
    assert len(files) <= FILES_OF_A_STEP, files
    assert {file for file in files if not file.startswith("core/")} == set()
