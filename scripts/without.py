"""
Deletes capabilities in a copy of the package, and shows that what is left works: all modules import, and DPO and SFT
train what padded TRL trains. Without names, deletes each folder, one after another.

    python scripts/without.py                # each alone: about half a minute for each
    python scripts/without.py images groups  # only these, together
    python scripts/without.py --all          # all of them together, with the whole of tests/core: about five minutes
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.test_house import PACKAGE  # noqa: E402

# Besides the core, what the tests run with: the comparison with padded TRL
KEPT = {"core", "cli"}
FOLDERS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py") if file.parent.name not in KEPT)
IMPORTS = """
import importlib, pkgutil, trl_paddingfree
for module in pkgutil.walk_packages(trl_paddingfree.__path__, "trl_paddingfree."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(trl_paddingfree.__file__)
"""


def works_without(folders: list[str], tests: list[str]) -> bool:
    """Whether what is left without these folders works."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("trl_paddingfree", "tests", "scripts", "docs", "configs"):
            shutil.copytree(ROOT / name, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
        for file in [*ROOT.glob("*.toml"), *ROOT.glob("*.md")]:
            shutil.copy(file, copy)
        for folder in folders:
            shutil.rmtree(Path(copy, "trl_paddingfree", folder))
            shutil.rmtree(Path(copy, "tests", folder), ignore_errors=True)
        print(f"--- without {', '.join(folders)}", flush=True)
        imports = [sys.executable, "-c", IMPORTS]
        trains = [sys.executable, "-m", "pytest", "-q", "--no-header", "-W", "ignore", *tests]
        return not any(subprocess.run(command, cwd=copy).returncode for command in (imports, trains))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help=f"of {', '.join(FOLDERS)}")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.all:
        cases, tests = [FOLDERS], ["tests/core", "-n", "2"]
    else:
        cases, tests = [args.folders] if args.folders else [[folder] for folder in FOLDERS], ["tests/core/test_text.py"]
    broken = [", ".join(case) for case in cases if not works_without(case, tests)]
    sys.exit(f"broken without: {'; '.join(broken)}" if broken else 0)


if __name__ == "__main__":
    main()
