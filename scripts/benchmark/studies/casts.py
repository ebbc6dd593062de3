"""LoRA under autocast with inputs that are cast once, beside PEFT's way, which casts them there and back."""

import statistics
import time
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.features import KEYS, TOKENS
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.budgets.predict import model_config
from trl_paddingfree.core.model.casts import cast_inputs_once
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import choose_route

from ..environment import machine_name
from ..launches import Launches
from ..report import table

MODEL, LAYERS = "smollm2-135m", (1, 4)  # what the second number has more than the first is that of layers
CAST_TWICE, CAST_ONCE = "PEFT's: float32 and back", "ours: cast once"
ROWS, LENGTH, ROUNDS = 4, 256, 15


class Way:
    """A flat model in bfloat16 with adapters in float32, whose inputs are cast once or twice, and rows of a shape."""

    def __init__(
        self, num_layers: int, is_once: bool = True, shape: tuple[int, int] = (ROWS, LENGTH),
        name: str = MODEL, attention: str = "sdpa", **changed: Any,
    ):  # fmt: skip
        config = model_config(name)
        config.update({"num_hidden_layers": num_layers, **changed})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).train()
        add_fused_lm_head(model)
        self.route = choose_route(model)
        self.flat = FlatModel.install(model, self.route)
        self.adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        self.adapted.enable_input_require_grads()
        if is_once:
            cast_inputs_once(self.adapted, "cpu")
        rows = np.random.default_rng(0).integers(0, config.vocab_size, shape).tolist()
        ids = torch.tensor(rows)
        self.inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        self.inputs["flat_batch"] = FlatBatch.from_rows(rows, rows)

    def forward(self) -> torch.Tensor:
        """The log-probabilities of a forward pass, as `bf16` has it."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.adapted(**self.inputs, fused_lm_head=True, use_cache=False).log_probs

    def step(self) -> None:
        """A forward and backward pass."""
        self.forward().sum().backward()

    def launches(self) -> int:
        """Kernels of a step, forward and backward."""
        with Launches() as counted:
            self.step()
        return len(counted.names)

    def kept(self) -> float:
        """Bytes that a token keeps for the backward pass in the last layer."""
        with torch.autocast("cpu", torch.bfloat16):
            kept = count_kept_bytes(self.flat.model, self.route).kept[-1]
        return float(kept[TOKENS] + kept[KEYS])

    def core_seconds(self) -> float:
        """Core time of a step."""
        started = time.process_time()
        self.step()
        return time.process_time() - started


def measure() -> dict[str, Any]:
    """Kernels and bytes of a layer, counted, and the core time of steps that take turns."""
    ways = {name: [Way(n, name == CAST_ONCE) for n in LAYERS] for name in (CAST_TWICE, CAST_ONCE)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (_, deep) in ways.items():
            times[name].append(deep.core_seconds())
    measured = [
        {
            "way": name,
            "kernels": (deep.launches() - shallow.launches()) / (LAYERS[1] - LAYERS[0]),
            "bytes_per_token": deep.kept(),
            "core_seconds": statistics.median(times[name][1:]),
        }
        for name, (shallow, deep) in ways.items()
    ]
    return {"model": MODEL, "layers": LAYERS[1], "rows": ROWS, "length": LENGTH, "rounds": ROUNDS, "measured": measured}


def report(result: dict[str, Any]) -> str:
    """The counts and times as a Markdown table."""
    first = result["measured"][0]
    lines = [
        "# Inputs of adapters cast once",
        "",
        f"{result['layers']} layers of {result['model']} train on {result['rows']} flat rows of {result['length']} "
        "tokens, in bfloat16 under autocast, with LoRA of rank 16 on all linear layers in float32. Kernels and bytes "
        "are counted for one layer, forward and backward. Core time is that of a whole step, the median of "
        f"{result['rounds']} that took turns, on {machine_name(result['environment'])}.",
        "",
    ]
    rows = []
    for one in result["measured"]:
        share, seconds = (one[name] / first[name] for name in ("bytes_per_token", "core_seconds"))
        kept = f"{one['bytes_per_token']:,.0f} ({share:.0%})"
        rows.append([one["way"], f"{one['kernels']:.0f}", kept, f"{seconds:.0%}"])
    heads = ["inputs of adapters", "kernels per layer", "bytes kept per token and layer", "core time of a step"]
    return "\n".join([*lines, *table(heads, rows)])
