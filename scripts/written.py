"""Files that scripts write and compare: `main` of each."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(description: str, texts: Mapping[Path, Callable[[], str]]) -> int:
    """Write the files, or with `--check` compare them with the texts that would be written: 1 if one is stale."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is stale")
    is_check = parser.parse_args().check
    for path, write in texts.items():
        text = write()
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is stale: run `python scripts/{Path(sys.argv[0]).name}`.")
            return 1
    return 0
