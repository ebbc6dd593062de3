"""What a reader of the package has to follow, counted: each number has a limit, which is only ever lowered."""

import ast
import io
import sys
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

import trl_paddingfree
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.pages import ROOT
from tests.helpers.tiny import DATA, make_model
from tests.runs import make_trainer
from trl_paddingfree.trainers.registry import TRAINERS

PACKAGE = Path(trl_paddingfree.__file__).parent  # it may be installed elsewhere
FILES = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}

WORDS, WORDS_OF_TESTS = 106_100, 176_550
ENTRIES = 13  # of the folder
IN_CIRCLES = 4  # files that import each other by any way, imports for annotations counted
LINES_OF_A_MODULE = 300
PLACES_THAT_SET_ATTRIBUTES = 22  # of others, for a time
ATTRIBUTES_OF_FLAT_MODEL = 14
CLASSES_ABOVE_A_TRAINER = 2  # between it and TRL's
# Task and options of a step of two layers, and its limits: functions, files, and hops from one file to another
STEPS = {
    "dpo": ("dpo", {"gradient_checkpointing": True}, (50, 14, 85)),
    "memory budget": ("dpo", {"memory_budget": 8}, (77, 20, 95)),
    "slices": ("dpo", {"max_tokens_per_micro_batch": 24, "per_device_train_batch_size": 6}, (149, 28, 1221)),
    "grpo": ("grpo", {}, (95, 18, 85)),
}


def words(source: str) -> int:
    """Tokens of Python, without comments, docstrings and line structure."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, holders) and node.body]
    strings = [x for x in nodes if isinstance(x, ast.Expr) and isinstance(getattr(x.value, "value", None), str)]
    docstrings = {line for x in strings for line in range(x.lineno, x.end_lineno + 1)}
    silent = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
    tokens = [(tokenize.tok_name[x.type], x.start[0]) for x in tokenize.generate_tokens(io.StringIO(source).readline)]
    return sum(name not in silent and (name != "STRING" or line not in docstrings) for name, line in tokens)


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


def test_words_are_counted_without_comments_and_docstrings():
    assert words('"""Doc."""\n\n\ndef f(x):  # why\n    """Doc."""\n    return "a" + x\n') == 10


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later Pythons count the parts of f-strings")
def test_the_package_and_its_tests_have_few_words():
    assert sum(map(words, FILES.values())) <= WORDS
    assert sum(words(file.read_text(encoding="utf-8")) for file in (ROOT / "tests").rglob("*.py")) <= WORDS_OF_TESTS


def test_the_package_has_few_entries_and_modules_are_short():
    assert len({Path(name).parts[0] for name in FILES} | {"py.typed"}) <= ENTRIES
    lengths = {name: len(source.splitlines()) for name, source in FILES.items()}
    assert {name: length for name, length in lengths.items() if length > LINES_OF_A_MODULE} == {}


def test_files_import_each_other_by_no_way_and_by_few_for_annotations():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["b", "c"]
    assert "upstream.py" in imported_files("model/routes.py")
    assert "trainers/registry.py" in imported_files("cli/train.py")
    typed, untyped = (imported_files("model/forward.py", annotations=x) for x in (True, False))
    assert typed > untyped
    assert in_circles({name: imported_files(name) for name in FILES}) == []
    assert len(in_circles({name: imported_files(name, annotations=True) for name in FILES})) <= IN_CIRCLES


def test_few_places_change_what_others_hold():
    places = "".join(FILES.values()).count("attributes_set(") - 1  # where it is defined
    assert places <= PLACES_THAT_SET_ATTRIBUTES
    assert len(vars(flat_model(make_model()))) <= ATTRIBUTES_OF_FLAT_MODEL


def test_few_classes_stand_between_a_trainer_and_trls():
    for trainer in TRAINERS.values():
        ours = [each for each in trainer.__mro__[1:] if each.__module__.startswith(PACKAGE.name)]
        assert len(ours) <= CLASSES_ABOVE_A_TRAINER, trainer


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


@pytest.mark.parametrize("name", STEPS)
def test_a_step_enters_few_functions_in_few_files(name):
    task, options, most = STEPS[name]
    called = calls_of_a_step(task, **options)
    hops = 1 + sum(one != other for (_, one), (_, other) in pairwise(called))
    found = len({*called}), len({file for _, file in called}), hops
    assert all(number <= limit for number, limit in zip(found, most, strict=True)), found
