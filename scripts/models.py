"""
Build a tiny model of every causal language model in transformers, run the start-up check on it, and write a table.

```
python scripts/models.py --output docs/models.md
python scripts/models.py --vision --output docs/models.md    # the second table, on the page that is there
python scripts/models.py --packed --output docs/packed.md    # what packed rows of TRL and transformers are
```

This takes about a minute on the CPU, in float32 and without a network. With flash attention, plain PyTorch stands in
for the kernel, inside transformers' own flash attention code.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.model_table import markdown, table  # noqa: E402
from scripts.packed_table import packed_page  # noqa: E402
from scripts.vision_table import HEADING, vision_section  # noqa: E402
from tests.helpers.architectures import MODEL_TYPES  # noqa: E402


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write; prints the page if left out")
    parser.add_argument("--vision", action="store_true", help="the table of images only; needs torchvision")
    parser.add_argument("--packed", action="store_true", help="the page about packed rows of others")
    arguments = parser.parse_args()
    heading = HEADING.split("\n\n")[0]
    written = arguments.output.read_text() if arguments.output and arguments.output.exists() else ""
    text, found, images = written.partition(heading)
    if arguments.packed:
        page = packed_page(MODEL_TYPES)
    elif arguments.vision:
        page = text + vision_section()
    else:
        page = markdown(table(MODEL_TYPES)) + found + images
    if arguments.output:
        arguments.output.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
