"""A decoder layer compiled beside the same one eager: its kernels, the bytes that they move, and the bytes it keeps."""

from typing import Any

import torch
from torch._inductor import compile_fx, config, metrics
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from trl_paddingfree.budgets.predict import kept_by_kernels
from trl_paddingfree.budgets.saved_bytes import SavedBytes
from trl_paddingfree.compiled.layers import compile_layers
from trl_paddingfree.core.model.restored import attributes_set
from trl_paddingfree.recomputable import recomputable_layers

from ..launches import Launches
from ..report import table
from .casts import Way

MODEL, TOKENS, WORDS = "llama-3-8b", 2048, 512  # embeddings and head are left out
# What takes as long in both ways
PRODUCTS = ("mm", "_scaled_dot_product")
# Bytes per second that the memory of GPUs moves, from NVIDIA's data sheets (SXM)
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}
# The step that docs/gpu.md predicts: distinct tokens, and layers
STEP_TOKENS, LAYERS = 5584, 32
EAGER, COMPILED = "eager", "compiled"

Counts = tuple[int, int]  # kernels that are no product, and the bytes that they read and write


def _way(num_layers: int, attention: str = "sdpa") -> Way:
    return Way(num_layers, shape=(1, TOKENS), name=MODEL, attention=attention, vocab_size=WORDS)


def _reference(way: Way) -> None:
    with torch.no_grad(), way.adapted.disable_adapter():
        way.forward()


def _launched(num_layers: int) -> list[Counts]:
    """What a model launches for a step and for the forward pass of its reference."""
    way, found = _way(num_layers), list[Counts]()
    for run in (way.step, lambda: _reference(way)):
        with Launches() as counted:
            run()
        moved = [size for name, size in zip(counted.names, counted.moved, strict=True) if not name.startswith(PRODUCTS)]
        found.append((len(moved), sum(moved)))
    return found


def _compile(way: Way) -> None:
    compile_layers(way.flat, {"backend": "inductor"})


def _compiled() -> list[Counts]:
    """What the compiler makes of a layer, for a step and for the forward pass of its reference."""
    way, found = _way(1), list[Counts]()
    _compile(way)
    # The compiler notes the kernels that it makes for its log alone
    log = compile_fx.inductor_metrics_log
    is_read = attributes_set([(log, "isEnabledFor", lambda level: True), (log, "info", lambda *args: None)])
    with is_read, config.patch(force_disable_caches=True):
        for run in (way.step, lambda: _reference(way)):
            metrics.reset()
            run()
            # It counts in units of 4 bytes
            others = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
            moved = [4 * size for node, size in metrics.nodes_num_elem if not isinstance(node, others)]
            found.append((len(moved), sum(moved)))
    return found


def _kept(name: str) -> int:
    """Bytes that a layer keeps for the backward pass."""
    way = _way(1, kept_by_kernels())
    if name == COMPILED:
        _compile(way)
    counter = SavedBytes(way.flat.model, recomputable_layers(way.flat.model))
    with counter.counting():
        output = way.forward()
    kept = counter.total(0)
    del output
    return kept


def measure() -> dict[str, Any]:
    """Kernels and bytes of a layer, counted on the CPU."""
    one, two = (_launched(n) for n in (1, 2))
    eager = [(more - fewer, moved - less) for (fewer, less), (more, moved) in zip(one, two, strict=True)]
    measured = [
        {"way": name, "step": step, "reference": reference, "kept": _kept(name)}
        for name, (step, reference) in ((EAGER, eager), (COMPILED, _compiled()))
    ]
    return {"model": MODEL, "tokens": TOKENS, "measured": measured}


def report(result: dict[str, Any]) -> str:
    """The counts as a Markdown table, and what they take on GPUs."""
    lines = [
        "# Layers, compiled one by one",
        "",
        f"A layer of {result['model']} trains on a flat row of {result['tokens']:,} tokens in bfloat16 under autocast, "
        "with LoRA of rank 16 on all linear layers in float32, whose inputs are cast once. Kernels are those that are "
        "neither matrix products nor attention; bytes are those that they read and write. Attention keeps what flash "
        "attention does.",
        "",
    ]
    rows = []
    for one in result["measured"]:
        (kernels, moved), (other, other_moved) = one["step"], one["reference"]
        cells = [f"{kernels} / {other}", f"{moved / 1e6:,.0f} MB / {other_moved / 1e6:,.0f} MB"]
        rows.append([one["way"], *cells, f"{one['kept'] / 1e6:,.0f} MB"])
    heads = ["layers", "kernels, step / reference", "bytes moved, step / reference", "kept for the backward pass"]
    lines += [*table(heads, rows), "", f"Milliseconds of these kernels in a DPO step of {STEP_TOKENS:,} tokens:", ""]
    scale, rows = LAYERS * STEP_TOKENS / result["tokens"], []
    for one in result["measured"]:
        moved = scale * (one["step"][1] + one["reference"][1])
        rows.append([one["way"], *(f"{1000 * moved / speed:.0f}" for speed in BANDWIDTHS.values())])
    heads = ["layers", *(f"{name}, {speed / 1e12:g} TB/s" for name, speed in BANDWIDTHS.items())]
    return "\n".join([*lines, *table(heads, rows)])
