"""Floating-point operations of models whose layers carry state: flat, with shared prefixes, and at the limit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.predict import model_config
from trl_paddingfree.core.data.collate import PreferenceCollator
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.forward import scored_in_rows
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.recurrent import tree as state_tree

from ..flops import StepCost, Work, count_flops
from ..report import table
from ..rows import make_rows
from ..shapes import SHAPES

MODELS = ("qwen3.5-narrow", "lfm2-350m-narrow")
# Rows of so many tokens, whole chunks of a recurrence, and how many are scored: they tell the cost of a token, of a
# pair, of a score and of a row apart
PROBES = (([64] * 2, 64), ([192] * 3, 128), ([512] * 2, 512), ([256] * 8, 128))


class Counter:
    """
    Counts forward and backward passes of a model on a device without memory, grouped as on CPUs.

    Args:
        shape (`str`):
            A key of `SHAPES`.
    """

    def __init__(self, shape: str):
        model = AutoModelForCausalLM.from_config(model_config(shape, SHAPES)).train()
        add_fused_lm_head(model)
        self.flat = FlatModel.install(model, choose_route(model))
        model.to("meta")
        self.cost = StepCost.solve([self._probe(lengths, scored) for lengths, scored in PROBES])

    def _probe(self, lengths: list[int], scored: int) -> tuple[Work, int]:
        rows = [[i] * n for i, n in enumerate(lengths)]
        labels = [[-100] * (n - scored) + row[:scored] for row, n in zip(rows, lengths, strict=True)]
        batch = FlatBatch.from_rows(rows, labels, prefix_sharing=False)
        return replace(Work.flat(batch, in_calls=True), in_rows=len(rows)), self(batch)

    def __call__(self, batch: FlatBatch) -> int:
        on_cpu = state_tree.step_cost(torch.device("cpu"))
        # PyTorch knows of no autocast there
        with (
            patch.object(state_tree, "step_cost", lambda _: on_cpu),
            patch("torch.is_autocast_enabled", lambda _: False),
        ):
            return count_flops(lambda: self._step(batch.to("meta")))

    def _step(self, batch: FlatBatch) -> None:
        labels = batch.row_index * batch.row_mask  # all are scored, as far as the batch scores them
        scored_in_rows(self.flat, batch, labels, {"use_cache": False})["log_probs"].sum().backward()


def measure_flops(
    count: Counter, source: str, shape: str, number: int = 6, batch_size: int = 8, max_length: int = 1024
) -> dict[str, Any]:
    """
    Operations of DPO's forward and backward pass on batches of pairs, drawn at random.

    Of `"flat"` and `"shared"` batches and of the `"limit"`, which computes each distinct token once in every layer:
    relative to padded rows. Also the `"batches"` counted.
    """
    rows = make_rows("dpo", source, vocab_size=SHAPES[shape]["vocab_size"], max_length=max_length)
    batches, totals = rows.batches(batch_size, seed=0)[:number], np.zeros(4)
    for examples in batches:
        flat, shared = (
            PreferenceCollator(0, padding_free=True, prefix_sharing=sharing)(examples)["flat_batch"]
            for sharing in (False, True)
        )
        lengths = [len(row) for row in flat.to_rows()]
        # As TRL on CPUs: attention and head see whole rectangles. Whatever computes a row, no state goes on at its end
        padded = Work.padded(lengths, 0, unpadded_attention=False, compact_head=False)
        least = [count.cost.of(replace(work, in_rows=len(lengths))) for work in (padded, Work.limit(shared))]
        totals += [least[0], count(flat), count(shared), least[1]]
    of_padded = dict(zip(("flat", "shared", "limit"), (totals[1:] / totals[0]).tolist(), strict=True))
    return {
        "model": shape,
        "rows": rows.name,
        "batches": len(batches),
        "batch_size": batch_size,
        "max_length": max_length,
        **of_padded,
    }


def measure(sources: Sequence[str]) -> dict[str, Any]:
    """Operations of each model on some lengths of preference data."""
    counters = {shape: Counter(shape) for shape in MODELS}
    return {
        "measured": [measure_flops(count, source, shape) for shape, count in counters.items() for source in sources]
    }


def report(result: dict[str, Any]) -> str:
    """The measurements as a Markdown table."""
    first = result["measured"][0]
    lines = [
        "# Models whose layers carry state",
        "",
        "The table has the floating-point operations of DPO's forward and backward pass, relative to padded rows, in "
        f"{first['batches']} random batches of {first['batch_size']} pairs, with rows of at most {first['max_length']} "
        "tokens. They are counted, not timed, with the layers in plain PyTorch and grouped as on CPUs. "
        "`qwen3.5-narrow` has three gated delta nets before each attention, and `lfm2-350m-narrow` has ten short "
        "convolutions and six attentions. The limit computes each distinct token once in every layer.",
        "",
    ]
    names = ("flat", "shared", "limit")
    rows = [
        [one["model"], one["rows"], *(f"{one[name]:.1%}" for name in names), f"{one['shared'] / one['limit']:.3f}"]
        for one in result["measured"]
    ]
    return "\n".join([*lines, *table(["model", "rows", *names, "shared / limit"], rows, left=2)])
