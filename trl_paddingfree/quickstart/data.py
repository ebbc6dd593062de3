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
    """
    Pairs of a question about a function or class of the standard library, and its docstring.

    Read from source, without importing anything, in the order of the files.
    """
    return tuple(_all_docstrings())


def _all_docstrings() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _LEFT_OUT.isdisjoint(parts):
            module = ".".join(parts).removesuffix(".__init__")
            yield from _docstrings_of(ast.parse(path.read_bytes()), module)


def _docstrings_of(tree: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _question_and_answer(node, f"class {name}.{node.name}")
            yield from _docstrings_of(node, f"{name}.{node.name}")
        elif isinstance(node, ast.FunctionDef):
            yield from _question_and_answer(node, f"def {name}.{node.name}({ast.unparse(node.args)})")


def _question_and_answer(node: ast.ClassDef | ast.FunctionDef, signature: str) -> Iterator[tuple[str, str]]:
    docstring = ast.get_docstring(node) or ""
    if len(docstring) >= _SHORTEST:
        yield f"What does this do?\n\n{signature}", docstring


def topics() -> Iterator[tuple[str, str]]:
    """Pairs of a question about the language, and what `help()` answers."""
    from pydoc_data.topics import topics as texts

    for topic, text in sorted(texts.items()):
        yield f"Explain “{topic}” in Python.", text.strip()


def conversations(seed: int = 0) -> list[dict[str, list[dict[str, str]]]]:
    """All questions with their answers, in random order, as `"prompt"` and `"completion"` messages."""
    rows = [*docstrings(), *topics()]
    random.Random(seed).shuffle(rows)
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in rows
    ]


def instruction_data(seed: int = 0) -> Dataset:
    """
    The questions and answers as TRL's prompt-completion rows.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the order.

    Examples:
    ```python
    >>> from trl_paddingfree.quickstart.data import instruction_data
    >>> instruction_data().column_names
    ['prompt', 'completion']

    ```
    """
    return Dataset.from_list(conversations(seed))


def preference_data(seed: int = 0) -> Dataset:
    """
    The questions as preference pairs: their own answer against the answer to another question.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the order.

    Examples:
    ```python
    >>> from trl_paddingfree.quickstart.data import preference_data
    >>> preference_data().column_names
    ['prompt', 'chosen', 'rejected']

    ```
    """
    rows = conversations(seed)
    half = len(rows) // 2  # far apart, so that no answer is preferred in one pair of a sample and rejected in another
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
            for row, other in zip(rows, rows[half:] + rows[:half], strict=True)
        ]
    )
