"""
Writes docs/llms.txt (https://llmstxt.org) from the README and the pages that list all others:

    python scripts/llms.py            write it
    python scripts/llms.py --check    exit with 1 if it is not what would be written
"""

import argparse
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def listed(page: Path) -> list[tuple[str, str, str]]:
    """The items of the list on a page: title, target and description."""
    return re.findall(r"^- \[(.+?)\]\((.+?)\)(?:: |：)(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def section(title: str, items: list[tuple[str, str, str]]) -> str:
    """A list of links under a heading."""
    return "\n".join([f"## {title}\n", *(f"- [{name}]({target}): {said}" for name, target, said in items)])


def llms() -> str:
    """The text of docs/llms.txt."""
    title, summary, details, *_ = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("\n\n")
    summary, details = (re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text).replace("\n", " ") for text in (summary, details))
    english = [("README", "../README.md", "installation, use, options and limits."), *listed(DOCS / "README.md")]
    chinese = [("中文说明", "../README.zh.md", "安装、使用、选项和限制。")]
    chinese += [(name, f"zh/{page}", said) for name, page, said in listed(DOCS / "zh" / "README.md") if "/" not in page]
    sections = [section("Docs", english), section("Optional", chinese)]
    return "\n\n".join([title, f"> {summary}", details, *sections]) + "\n"


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
