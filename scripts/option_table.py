"""
Write the table of docs/options.md from the help texts of the options, which `--help` prints, too:

    python scripts/option_table.py            write it
    python scripts/option_table.py --check    exit with 1 if it is not what would be written
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields

from written import ROOT, write_or_check

sys.path.insert(0, str(ROOT))

from trl_paddingfree import PaddingFreeOptions  # noqa: E402
from trl_paddingfree.registry import TRAINERS  # noqa: E402

PAGE = ROOT / "docs" / "options.md"
START, END = "<!-- options:start -->", "<!-- options:end -->"
# Where a page has more than the help text
MORE = {
    "padding_free": "[Moving here](moving_here.md#from-padded-trl), [Resuming](many_gpus.md#resuming)",
    "flat_attention": "[Backends](#backends)",
    "arrange_micro_batches": "[Balancing work](many_gpus.md#balancing-work)",
    "max_tokens_per_micro_batch": "[Tokens by hand](memory.md#tokens-by-hand)",
    "memory_budget": "[Memory](memory.md)",
    "sequence_parallel_size": "[Long rows on several GPUs](sequence_parallel.md)",
    "check_steps": "[What is proven when](accuracy.md#what-is-proven-when)",
    "answer_pairs": "[Several answers](answers.md)",
}


def shown(value: object) -> str:
    """A default as the table has it."""
    return "none" if value is None else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def rows() -> Iterator[str]:
    """The rows of the table, one for each option."""
    for field in fields(PaddingFreeOptions):
        default = shown(field.default)
        for task, trainer in TRAINERS.items():
            own = trainer.config_class.__dataclass_fields__[field.name].default
            if own is not MISSING and own != field.default:
                default += f"; {shown(own)} for {task.upper()}"
        text = re.sub(r"'(\w+)'", r'`"\1"`', field.metadata["help"])
        more = f" More: {MORE[field.name]}." if field.name in MORE else ""
        yield f"| `{field.name}` | {default} | {text}{more} |"


def page() -> str:
    """The page, with the table as it would be written."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    table = "\n".join(["| option | default | meaning |", "|-|-|-|", *rows()])
    return f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {PAGE: page}))
