"""
Build every causal language model of transformers tiny, run the start-up check on it, and write what it says as a table.

```
python scripts/models.py --output docs/models.md
python scripts/models.py --types llama,qwen3_next
```

Runs on the CPU in float32, without network, in about a minute. With flash attention, plain PyTorch stands in for the
kernel, inside transformers' own flash attention code.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.architectures import MODEL_TYPES  # noqa: E402
from tests.helpers.model_table import markdown, table  # noqa: E402


def main() -> None:
    """Write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write; prints the page if left out")
    parser.add_argument("--types", help="model types, separated by commas; all of transformers if left out")
    arguments = parser.parse_args()
    page = markdown(table(arguments.types.split(",") if arguments.types else MODEL_TYPES))
    if arguments.output:
        arguments.output.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
