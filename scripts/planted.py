"""
Put mistakes into a model, see where each is caught, and write the table of docs/accuracy.md.

```
python scripts/planted.py    # takes about two minutes on the CPU
```
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TRL_PADDINGFREE_CACHE"] = "off"

import torch  # noqa: E402

from tests.helpers.pages import ROOT  # noqa: E402
from tests.proof.planted import MISTAKES, caught  # noqa: E402

PAGE = ROOT / "docs" / "accuracy.md"


def at(where: str) -> str:
    """Where a mistake is caught, of the columns of the table."""
    return "later step" if where.startswith("step ") else where


def table() -> str:
    """
    Of each mistake, where it is caught in float32 and in bfloat16, if the first micro-batch shows it, and if only a
    later one does.
    """
    dtypes = (torch.float32, torch.bfloat16)
    shown = [f"{str(dtype)[6:]}, shown by the {which}" for dtype in dtypes for which in ("first", "third")]
    lines = [f"| planted mistake | {' | '.join(shown)} |", "|-" * (1 + len(shown)) + "|"]
    for mistake in MISTAKES:
        found = [at(caught(mistake, shows_at, dtype)) for dtype in dtypes for shows_at in (0, 2)]
        lines.append(f"| {mistake.name} | {' | '.join(found)} |")
    return "\n".join(lines)


def main() -> int:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    before, after = "<!-- planted -->", "<!-- /planted -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(before)
    _, _, tail = rest.partition(after)
    PAGE.write_text(f"{head}{before}\n{table()}\n{after}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
