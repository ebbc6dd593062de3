"""
Write docs/llms.txt (https://llmstxt.org) from the README and the page that lists all others:

    python scripts/llms.py            write it
    python scripts/llms.py --check    exit with 1 if it is not what would be written
"""

import argparse
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def llms() -> str:
    """The text of docs/llms.txt."""
    title, summary, *others = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("\n\n")
    details = next(text for text in others if text.startswith("TRL pads"))
    summary, details = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text).replace("\n", " ") for text in (summary, details))
    items = [("README", "../README.md", "installation, quick start and first use.")]
    items += re.findall(r"^- \[(.+?)\]\((.+?)\): (.*)$", (DOCS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = "\n".join(["## Docs\n", *(f"- [{name}]({target}): {said}" for name, target, said in items)])
    return "\n\n".join([title, f"> {summary}", details, pages]) + "\n"


def main() -> int:
    """Write the file, or compare it with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if docs/llms.txt is stale")
    path, text = DOCS / "llms.txt", llms()
    if not parser.parse_args().check:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        print("docs/llms.txt is stale: run `python scripts/llms.py`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
