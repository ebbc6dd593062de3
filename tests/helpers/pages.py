"""The code on the documentation's pages, as the tests run it, and what it leaves in the checkout."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def changed_files() -> set[str]:
    """What git calls changed, new or ignored in the checkout, without caches of tools; nothing without a checkout."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return set()
    listed = ["git", "status", "--porcelain", "--ignored"]
    lines = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line for line in lines if not re.search(r"__pycache__/$|/?\.\w+(_cache)?/$|\.hypothesis|egg-info", line)}


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def short_and_local(example: str, models: dict[str, str], folder: Path, steps: int = 1) -> str:
    """
    An example with models of the tests in place of those that it names, which trains one step, or so many.

    Args:
        example (`str`):
            Python code that builds and trains a trainer.
        models (`dict[str, str]`):
            Names of models on the hub, and the folders that stand for them.
        folder (`Path`):
            Where the example writes.
    """
    # What TRL's own configurations ask for without a GPU; those of this package choose it by themselves
    on_cpu = "" if re.search(r"PaddingFree\w+Config\(", example) else "bf16=False, use_cpu=True, "
    short = f'output_dir={str(folder)!r}, {on_cpu}max_steps={steps}, report_to="none"'
    named = {f'"{name}"': repr(folder) for name, folder in models.items() if f'"{name}"' in example}
    assert named
    for written, runs in {**named, 'output_dir="out"': short}.items():
        example = example.replace(written, runs)
    return example
