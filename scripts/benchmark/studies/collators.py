"""Time to collate a large batch: the data loader's workers must be done before the step is."""

import statistics
import time
from typing import Any

from trl.trainer.dpo_trainer import DataCollatorForPreference

from trl_paddingfree.core.data.collate import PreferenceCollator

from ..environment import machine_name
from ..report import table
from ..rows import make_rows


def measure(length: int = 4096, pairs: int = 32, repeats: int = 5) -> dict[str, Any]:
    """Time TRL's collator and ours on one core, on so many pairs of rows of so many tokens, half of them prompt."""
    cases = [
        ("TRL's collator", DataCollatorForPreference(pad_token_id=0), 1),
        ("ours, nothing shared", PreferenceCollator(0, padding_free=True, prefix_sharing=False), 1),
        ("ours, a prompt shared by 2 rows", PreferenceCollator(0, padding_free=True), 1),
        ("ours, a prompt shared by 16 rows", PreferenceCollator(0, padding_free=True), 8),
    ]
    results = []
    for label, collator, pairs_per_prompt in cases:
        rows = make_rows(
            "dpo", f"equal:{length}", vocab_size=32000, max_length=length, pairs_per_prompt=pairs_per_prompt
        )
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            collator(rows.examples[:pairs])
            times.append(1000 * (time.perf_counter() - started))
        results.append({"collator": label, "rows": 2 * pairs, "length": length, "ms": statistics.median(times)})
    return {"measured": results}


def report(result: dict[str, Any]) -> str:
    """The times as a Markdown table."""
    first = result["measured"][0]
    lines = [
        "# Time to collate",
        "",
        f"The collators take {first['rows']} rows of {first['length']:,} tokens on one core, without workers, on "
        f"{machine_name(result['environment'])}.",
        "",
        *table(["collator", "milliseconds"], [[one["collator"], f"{one['ms']:.0f}"] for one in result["measured"]]),
    ]
    return "\n".join(lines)
