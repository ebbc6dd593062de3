"""Lays the site out as the repository is, so that links work in both, and orders its pages as docs/README.md does."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# The front page, and the page that lists all others
FRONT, INDEX = "README.md", "docs/README.md"


def links(page: str) -> dict[str, str]:
    """Files of the repository that a page links to, each with the text of the link."""
    found: dict[str, str] = {}
    for text, target in re.findall(r"\[([^]]*)\]\(([^)#\s]+)", (ROOT / page).read_text(encoding="utf-8")):
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if (ROOT / path).is_file():
            found.setdefault(path, text)
    return found


def on_config(config):
    pages = {page: text for page, text in links(INDEX).items() if page.endswith(".md") and page != FRONT}
    config.nav = [FRONT, INDEX, *({text: page} for page, text in pages.items())]
    return config


def on_files(files, config):
    """Every page that can be reached from the front page, every file that these link to, and what the theme brings."""
    names, waiting = set(), [FRONT, INDEX]
    while waiting:
        names.add(name := waiting.pop())
        if name.endswith(".md"):
            waiting += links(name).keys() - names
    own = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in sorted(names)]
    return Files([*own, *(file for file in files if file.src_dir != config.docs_dir)])
