"""
Count the operations of the examples of docs/any_trainer.md, padded and with `padding_free`, and write the page's table.

```
python scripts/any_trainer.py    # takes about a minute on the CPU
```
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from transformers import set_seed  # noqa: E402

import trl_paddingfree  # noqa: E402
from scripts.benchmark.flops import flop_counter  # noqa: E402
from tests.helpers.pages import ROOT, blocks, short_and_local  # noqa: E402
from trl_paddingfree.cli.quickstart.compare import texts  # noqa: E402
from trl_paddingfree.cli.quickstart.model import instruction_data, make_model, make_tokenizer, preference_data  # noqa: E402

PAGE = ROOT / "docs" / "any_trainer.md"
MODEL, STEPS, BATCH = "Qwen/Qwen3-0.6B", 4, 8
padding_free = trl_paddingfree.padding_free  # the function itself: the name is patched while examples run


def data_of(name: str, split: str):
    """Rows of Python's documentation in place of a dataset of the examples, as many as the steps take."""
    if "ultrafeedback" in name:
        return preference_data().select(range(STEPS * BATCH))
    data = instruction_data().select(range(STEPS * BATCH))
    return data.map(lambda row: {"messages": row["prompt"] + row["completion"]}, remove_columns=data.column_names)


def operations(example: str, folder: str, is_flat: bool) -> float:
    """Operations of an example, which trains for a few steps."""
    set_seed(0)
    local = short_and_local(example, {MODEL: folder}, Path(folder) / "out", steps=STEPS)
    with mock.patch("datasets.load_dataset", data_of), flop_counter() as counter:
        # The start-up check would add its operations to those of the steps
        line = (lambda model: padding_free(model, check=False)) if is_flat else (lambda model: model)
        with mock.patch.object(trl_paddingfree, "padding_free", line):
            exec(local.replace("print(FlatModel", "(FlatModel").replace(".counts)", ")"), {})
    return counter.get_total_flops()


def table() -> str:
    """The rows of the table."""
    text = PAGE.read_text()
    titles, examples = re.findall(r"## (.*)\n\n```python", text), blocks(text, "python")
    lines = ["| example | operations, padded | with `padding_free` | share |", "| --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(list(texts(preference_data())))
        make_model(tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for title, example in zip(titles, examples, strict=True):
            padded, flat = (operations(example, folder, is_flat) for is_flat in (False, True))
            lines.append(f"| {title} | {padded / 1e9:.0f} G | {flat / 1e9:.0f} G | {flat / padded:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    before, marked = "<!-- operations -->", "<!-- /operations -->"
    head, _, rest = PAGE.read_text().partition(before)
    _, _, tail = rest.partition(marked)
    PAGE.write_text(f"{head}{before}\n{table()}\n{marked}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
