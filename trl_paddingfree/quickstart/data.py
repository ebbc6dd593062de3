"""Real text that every Python has: its own documentation, as instruction rows and as preference pairs."""

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from datasets import Dataset

# Folders of the standard library that hold tests, applications or other people's packages
_LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
# Shorter ones ("Return self.") say nothing
_SHORTEST = 20


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """Pairs of a question about a function or class of the standard library, and its docstring, read from source."""
    root, found = Path(sysconfig.get_path("stdlib")), list[tuple[str, str]]()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _LEFT_OUT.isdisjoint(parts):
            found += _docstrings_of(ast.parse(path.read_bytes()), ".".join(parts).removesuffix(".__init__"))
    return tuple(found)


def _docstrings_of(tree: ast.Module | ast.ClassDef, module: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        name = f"{module}.{node.name}"
        signature = f"class {name}" if isinstance(node, ast.ClassDef) else f"def {name}({ast.unparse(node.args)})"
        docstring = ast.get_docstring(node) or ""
        if len(docstring) >= _SHORTEST:
            yield f"What does this do?\n\n{signature}", docstring
        if isinstance(node, ast.ClassDef):
            yield from _docstrings_of(node, name)


def topics() -> Iterator[tuple[str, str]]:
    """Pairs of a question about the language, and what `help()` answers."""
    from pydoc_data.topics import topics as texts

    for topic, text in sorted(texts.items()):
        yield f"Explain “{topic}” in Python.", text.strip()


def instruction_data(seed: int = 0) -> Dataset:
    """All questions with their answers as TRL's prompt-completion rows, in random order."""
    rows = [*docstrings(), *topics()]
    random.Random(seed).shuffle(rows)

    def said(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    return Dataset.from_list([{"prompt": said("user", q), "completion": said("assistant", a)} for q, a in rows])


def preference_data(seed: int = 0) -> Dataset:
    """The questions as preference pairs: their own answer against the answer to another question."""
    pairs = instruction_data(seed).rename_column("completion", "chosen")
    half = len(pairs) // 2  # far apart, so that no answer is preferred in one pair of a sample and rejected in another
    return pairs.add_column("rejected", pairs["chosen"][half:] + pairs["chosen"][:half])
