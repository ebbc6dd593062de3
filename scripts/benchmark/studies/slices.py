"""What slices cost and save: operations and peak bytes beside layers that recompute, and the lengths that fit.

Operations and bytes are counted, on the CPU, where neither varies. The lengths that fit are predicted, by the formula
of `memory_budget`, whose prediction for the counted batches stands beside what they took.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_paddingfree import FlatBatch, Segments
from trl_paddingfree.budgets.features import memory_features, slice_features
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.budgets.needs import MemoryNeeds, fused_head
from trl_paddingfree.budgets.predict import decoder, features_of, kept_by_kernels, model_config, training_needs
from trl_paddingfree.core.device import GIB
from trl_paddingfree.core.flat.schedule import Schedule
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route, choose_route
from trl_paddingfree.recomputable import recomputable_layers, recompute_first
from trl_paddingfree.slices.axis import cut_by_size, kept_keys
from trl_paddingfree.slices.passes import scheduled

from ..measure import most_allocated
from ..report import table

# Counted: rows of these many completions of so many tokens, after a prompt of so many; and tokens of a slice
CASES = {
    "one path of 2,304 tokens": (1, 2304, 0, 128),
    "16 completions of 128 tokens, prompt of 512": (16, 128, 512, 256),
    "24 completions of 128 tokens, prompt of 512": (24, 128, 512, 256),
    "16 completions of 128 tokens, prompt of 2,048": (16, 128, 2048, 384),
}
OF_CURVE = "24 completions of 128 tokens, prompt of 512"
SHAPE = decoder("llama", 256, 704, 8, 8, 4, 256)
# Predicted: a model, its tuning, and the GiB of a device, of which 3 are left to CUDA and to fragments
MODEL, TUNING, DEVICE_GIB = "llama-3-8b", "lora", 77.0
SLICE, COMPLETION, PROMPT = 2048, 2048, 8192
METHODS = ("nothing", "every layer", "slices")  # what is recomputed


def _path(tokens: int) -> tuple[Segments, int]:
    """A single row, and how many of its tokens are scored."""
    return Segments((tokens,), (-1,), (0,)), tokens


def _group(number: int) -> tuple[Segments, int]:
    """So many completions of one prompt, whose last token each has for itself, and how many tokens are scored."""
    branches = number - 1
    lengths = (PROMPT + COMPLETION, *[COMPLETION + 1] * branches)
    return Segments(lengths, (-1, *[0] * branches), (0, *[PROMPT - 1] * branches)), number * COMPLETION


# Of a path the most tokens, and of a group the most completions are looked for
LAYOUTS = {"one path": _path, f"completions of {COMPLETION:,} tokens after a prompt of {PROMPT:,}": _group}


def measure() -> dict[str, Any]:
    """Count what each case takes, and predict which lengths fit."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("small", {"small": SHAPE})).train()
    for name, parameter in model.named_parameters():  # as with adapters, most weights get no gradient
        parameter.requires_grad_("norm" in name)
    model.enable_input_require_grads()
    add_fused_lm_head(model)
    flat = FlatModel.install(model, choose_route(model))
    kept = count_kept_bytes(model, flat.route)
    needs = MemoryNeeds(0, kept, fused_head(model), float(kept.factor))
    return {
        "counted": [_count(flat, needs, name, *case) for name, case in CASES.items()],
        "curve": _curve(flat, needs, *CASES[OF_CURVE]),
        "fit": _lengths_that_fit(),
    }


def _rows(number: int, length: int, prompt: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows and labels of a group, of which completions are scored."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, prompt).tolist()
    completions = [rng.integers(0, 256, length).tolist() for _ in range(number)]
    return [shared + row for row in completions], [[-100] * prompt + row for row in completions]


def _measured(flat: FlatModel, rows: list, targets: list, schedule: Schedule, recomputed: int = 0) -> dict[str, int]:
    """Operations and peak bytes of a forward and backward pass of which the first layers recompute."""
    given = {"input_ids": torch.tensor(rows), "labels": torch.tensor(targets)}
    batch = scheduled(FlatBatch.from_rows(rows, targets), schedule)
    flat.model.gradient_checkpointing_enable({"use_reentrant": False})
    recompute_first(recomputable_layers(flat.model), recomputed)

    def run() -> None:
        flat.model(**given, flat_batch=batch, fused_lm_head=True, use_cache=False).log_probs.sum().backward()
        flat.model.zero_grad()

    run()  # what is made once
    with FlopCounterMode(display=False) as flops:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return {"flops": flops.get_total_flops(), "peak_bytes": most_allocated(profiler)}


def _predicted(flat: FlatModel, needs: MemoryNeeds, batch: FlatBatch, cuts: tuple[int, ...], size: int) -> np.ndarray:
    """The peaks that a budget predicts if the last one, two, ... slices keep their activations."""
    segments = batch.layout.segments
    whole = features_of(segments.num_tokens, 0, len(batch.scored))  # keys are counted by slice
    slices = slice_features(segments, cuts, flat.route)
    return needs.peaks_of_slices(slices, kept_keys(segments, cuts, needs.per_feature.windows), whole, size)


def _count(flat: FlatModel, needs: MemoryNeeds, name: str, number: int, length: int, prompt: int, size: int) -> dict:
    """What a case takes, by method."""
    rows, targets = _rows(number, length, prompt)
    batch = FlatBatch.from_rows(rows, targets)
    cuts = cut_by_size(batch.layout.segments, size)
    every = len(recomputable_layers(flat.model))
    schedules = (Schedule(), 0), (Schedule(), every), (Schedule(cuts, head_chunk=size), 0)
    return {
        "name": name,
        "tokens": batch.counts.computed,
        "slices": len(cuts) - 1,
        "methods": {
            method: _measured(flat, rows, targets, *how) for method, how in zip(METHODS, schedules, strict=True)
        },
        "predicted_bytes": int(_predicted(flat, needs, batch, cuts, size)[0]),
    }


def _curve(flat: FlatModel, needs: MemoryNeeds, number: int, length: int, prompt: int, size: int) -> list[dict]:
    """From one slice that keeps its activations to all of them, and from all layers that recompute to none."""
    rows, targets = _rows(number, length, prompt)
    batch, found = FlatBatch.from_rows(rows, targets), list[dict]()
    cuts, layers = cut_by_size(batch.layout.segments, size), len(recomputable_layers(flat.model))
    peaks = _predicted(flat, needs, batch, cuts, size)
    for kept in range(1, len(cuts), 2):
        measured = _measured(flat, rows, targets, Schedule(cuts, head_chunk=size, kept_slices=kept))
        found.append({"how": f"{kept} of {len(peaks)} slices kept", **measured, "predicted": int(peaks[kept - 1])})
    peaks = needs.peaks(memory_features(batch, flat.route))
    for recomputed in range(layers, -1, -2):
        measured = _measured(flat, rows, targets, Schedule(), recomputed)
        how = f"whole, {recomputed} of {layers} layers recomputed"
        found.append({"how": how, **measured, "predicted": int(peaks[recomputed])})
    return sorted(found, key=lambda each: each["peak_bytes"])


def _lengths_that_fit() -> list[dict[str, Any]]:
    """How long one path may be, and how many completions a group may have."""
    needs, route = training_needs(model_config(MODEL), TUNING, 0), Route("flash", kept_by_kernels(), True)

    def peak(batch: Callable[[int], tuple[Segments, int]], method: str, number: int) -> int:
        segments, scored = batch(number)
        whole = features_of(segments.num_tokens, sum(segments.key_lengths), scored)
        if method != "slices":
            return int(needs.peaks(whole)[0 if method == "nothing" else -1])
        cuts = cut_by_size(segments, SLICE)
        slices = slice_features(segments, cuts, route)
        return int(needs.peaks_of_slices(slices, kept_keys(segments, cuts, needs.per_feature.windows), whole, SLICE)[0])

    return [
        {"layout": layout, "most": {method: _most(partial(peak, batch, method)) for method in METHODS}}
        for layout, batch in LAYOUTS.items()
    ]


def _most(peak: Callable[[int], int]) -> int:
    """The largest number whose peak fits."""
    low, high = 0, 1
    while peak(high) <= DEVICE_GIB * GIB and high < 2**22:
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= DEVICE_GIB * GIB else (low, middle)
    return low


def report(result: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    counted = []
    for case in result["counted"]:
        none, every, slices = (case["methods"][name] for name in METHODS)
        flops = [f"{method['flops'] / none['flops']:.2f}" for method in (every, slices)]
        sizes = [each["peak_bytes"] for each in (none, every, slices)] + [case["predicted_bytes"]]
        cells = [case["name"], f"{case['tokens']:,}", str(case["slices"]), *flops, *(f"{x / 1e6:.0f}" for x in sizes)]
        counted.append(cells)
    flops_heads = ["operations: every layer recomputed", "slices"]
    bytes_heads = ["MB: nothing recomputed", "every layer recomputed", "slices", "predicted"]
    least = min(each["flops"] for each in result["curve"])
    curve = [
        [each["how"], f"{each['flops'] / least:.2f}", *(f"{each[x] / 1e6:.0f}" for x in ("peak_bytes", "predicted"))]
        for each in result["curve"]
    ]
    fit = [[row["layout"], *(f"{row['most'][name]:,}" for name in METHODS)] for row in result["fit"]]
    lines = [
        "# Slices, one after another",
        "",
        "One forward and backward pass of a small Llama (8 layers of 256 channels, float32, gradients of few weights), "
        "counted on the CPU. Operations are relative to those of a pass that recomputes nothing, and bytes are the "
        "most that tensors hold at a time, without weights. `predicted` is what `memory_budget` expects of the slices.",
        "",
        *table(["batch", "tokens", "slices", *flops_heads, *bytes_heads], counted),
        "",
        "## As few slices recomputed as fit",
        "",
        f"The same for {OF_CURVE}, with more and more memory: how many of the last slices keep their activations, and "
        "how many layers recompute where the batch is computed whole.",
        "",
        *table(["how", "operations", "MB", "predicted"], curve),
        "",
        "## What fits into 80 GB",
        "",
        "Predicted for Llama 3.1 8B with LoRA in bfloat16 on a GPU of 80 GB, of which 3 GiB are left to CUDA, in "
        f"slices of {SLICE:,} tokens: the tokens of one path, and the completions of a group.",
        "",
        *table(["micro-batch", "nothing recomputed", "every layer recomputed", "slices"], fit),
    ]
    return "\n".join(lines)
