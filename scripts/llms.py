"""
Write docs/llms.txt (https://llmstxt.org) from the README and the page that lists all others:

    python scripts/llms.py            write it
    python scripts/llms.py --check    exit with 1 if it is not what would be written
"""

import re
import sys
from pathlib import Path

from written import write_or_check

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


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {DOCS / "llms.txt": llms}))
