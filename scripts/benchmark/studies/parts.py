"""A memory budget that a micro-batch exceeds, so that it runs in parts, beside padded TRL.

As in training, the data loader has workers and, where there is an accelerator, pins memory.
"""

from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig

from trl_paddingfree.budgets.predict import features_of, model_config, training_needs
from trl_paddingfree.cli.quickstart.side_by_side import classes_of, make_trainer
from trl_paddingfree.core.device import GIB

from ..differences import differences
from ..environment import default_device, machine_name
from ..run import SMALL, TOLERANCES
from ..shapes import SHAPES
from ..trainers import make_model, make_tokenizer, same_weights

STEPS, BATCH_SIZE, MAX_LENGTH = 3, 8, 1024
# Pairs of a micro-batch that the budget holds: few enough to split, and as many as spare the prediction its rounding
HELD = 3


def measure(model: str | None = None) -> dict[str, Any]:
    """Train DPO with LoRA by padded TRL, and by ours under the budget."""
    device = default_device()
    on_accelerator = device != "cpu"
    model = model or ("llama-3.2-1b" if on_accelerator else "tiny")
    dtype = torch.bfloat16 if on_accelerator else torch.float32
    base = make_model(model, dtype, device)
    pairs = [_pair(np.random.default_rng(i)) for i in range(BATCH_SIZE * STEPS)]
    tokens = sum(len(text.split()) for pair in pairs[:HELD] for text in pair.values())
    needs, held = training_needs(model_config(model, SHAPES), "lora", 1), features_of(tokens, tokens, tokens)
    # The prediction is in bfloat16: in float32, weights and activations have twice the bytes
    budget = float(needs.peaks(held)[-1]) / GIB * dtype.itemsize / 2
    padded = _train(base, pairs, on_accelerator, {})
    ours = _train(base, pairs, on_accelerator, {"memory_budget": budget})
    allowed = TOLERANCES[str(dtype).removeprefix("torch.")]
    found = differences(padded["logs"], ours["logs"], floor=SMALL)
    off = {name: found[name] for name in allowed}
    return {
        "model": model,
        "budget_gib": budget,
        "methods": {"TRL, padded": padded, "ours, in parts": ours},
        "differences": off,
        "allowed": allowed,
        "agree": all(value <= allowed[name] for name, value in off.items()),
        "split": ours["parts"] > STEPS,
    }


def _pair(rng: np.random.Generator) -> dict[str, str]:
    """A pair of words that the tokenizer has."""
    return {
        name: " " + " ".join(rng.choice(["a", "b"], rng.integers(low, high)))
        for name, low, high in (("prompt", 100, 400), ("chosen", 50, 300), ("rejected", 50, 300))
    }


def _train(base: Any, pairs: list[dict[str, str]], on_accelerator: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run, backward passes, and the highest peak of memory where PyTorch knows it."""
    torch.manual_seed(0)
    settings = {
        "per_device_train_batch_size": BATCH_SIZE,
        "max_length": MAX_LENGTH,
        "max_steps": STEPS,
        "dataloader_num_workers": 2,
        "dataloader_pin_memory": on_accelerator,
        **options,
    }
    trainer = make_trainer(
        *classes_of("dpo", ours=bool(options)),
        settings,
        model=same_weights(base),
        train_dataset=Dataset.from_list(pairs),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    backward, parts = torch.Tensor.backward, list[Any]()
    if on_accelerator:
        torch.accelerator.reset_peak_memory_stats()
    # Not on the accelerator or its class: with a backward pass of one's own, nothing runs in parts
    with mock.patch.object(torch.Tensor, "backward", lambda *args, **kwargs: parts.append(backward(*args, **kwargs))):
        trainer.train()
    logs = trainer.state.log_history
    # A budget resets PyTorch's peak for each part, and logs the highest
    peaks = [entry.get("flat/peak_memory_gib", 0.0) for entry in logs]
    peak = max([torch.accelerator.max_memory_allocated() / GIB, *peaks]) if on_accelerator else None
    return {"parts": len(parts), "peak_gib": peak, "logs": logs}


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    allowed, off = result["allowed"], result["differences"]
    split, agree = (
        "ran in parts" if result["split"] else "DID NOT SPLIT",
        "agree" if result["agree"] else "DO NOT AGREE",
    )
    figures = ", ".join(f"{name} {off[name]:.0e} (allowed {allowed[name]:.0e})" for name in off)
    lines = [
        "# A memory budget that splits",
        "",
        f"DPO trains {result['model']} with LoRA for {STEPS} steps of {BATCH_SIZE} pairs, under "
        f"`memory_budget={result['budget_gib']:.3f}`, on {machine_name(result['environment'])}. Micro-batches {split}, "
        f"and all figures {agree}; largest relative differences: {figures}.",
        "",
        "| method | forward and backward passes | losses | peak GiB | predicted GiB |",
        "|-|-:|-|-:|-:|",
    ]
    for name, found in result["methods"].items():
        losses = " ".join(f"{entry['loss']:.4f}" for entry in found["logs"] if "loss" in entry)
        predicted = max(entry.get("flat/predicted_memory_gib", 0) for entry in found["logs"])
        cells = [f"{gib:.3f}" if gib else "" for gib in (found["peak_gib"], predicted)]
        lines.append(f"| {name} | {found['parts']} | {losses} | {' | '.join(cells)} |")
    return "\n".join(lines)
