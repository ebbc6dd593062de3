"""Predicts memory and speed of training from the configuration of a model and the lengths of rows.

The first layers, enough for one of each kind, are created with random weights, and what they keep for the backward
pass is counted as in training. [`~trl_paddingfree.budgets.needs.MemoryNeeds`] then computes the peaks. Only the
configuration is downloaded.
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets.utils import tqdm
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from trl.trainer.utils import add_fused_lm_head

from ..core import upstream
from ..core.device import GIB
from ..core.flat.counts import BatchCounts
from ..core.model.architecture import beyond_varlen
from ..core.model.casts import cast_inputs_once
from ..core.model.flat_model import FlatModel
from ..core.model.routes import choose_route
from ..core.spelling import did_you_mean
from ..recomputable import recomputable_layers
from .features import CONSTANT, FEATURES, KEYS, SCORED, TOKENS
from .kept_bytes import count_kept_bytes
from .needs import HeadBytes, MemoryNeeds

# Weights and activations are bfloat16, as on GPUs. A 4-bit weight takes 4 bits and, on average, 0.127 bits of scales
DTYPE, BYTES, BYTES_IN_4_BITS = torch.bfloat16, 2, 4.127 / 8
# Kept per trained weight, in its dtype: the gradient, and Adam's two moments
COPIES = 3
# Vocabulary of the model whose layers are counted: a small one will do, because embeddings and head are calculated
VOCABULARY = 512
# Where the search for the largest batch ends
MOST_EXAMPLES = 2**30
# Tasks that have a reference model
_WITH_REFERENCE = ("dpo", "kto")
# The counts of tokens and of keys in each layout
LAYOUTS = {"padded": ("padded", "padded"), "padding_free": ("real", "real"), "shared": ("computed", "real")}
# Fields of a configuration that list the type of each layer
_TYPES = ("layer_types", "mlp_layer_types")

Shape = dict[str, Any]  # fields of a configuration


# Fields of a decoder, in the order of [`decoder`]'s arguments
_FIELDS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip


def decoder(*values: str | int, tied: bool = True) -> Shape:
    """The shape of a decoder, for [`~transformers.AutoConfig`], from values of its fields."""
    return dict(zip(_FIELDS, (*values, tied), strict=True))


# Sizes from the models' published configurations
SHAPES = {
    "llama-3-8b": decoder("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
    "llama-3.2-1b": decoder("llama", 2048, 8192, 16, 32, 8, 128256),
    "qwen2.5-0.5b": decoder("qwen2", 896, 4864, 24, 14, 2, 151936),
    "qwen2.5-7b": decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "smollm2-135m": decoder("llama", 576, 1536, 30, 9, 3, 49152),
    # Too small to keep any device busy: shows what a step costs on the host
    "tiny": decoder("llama", 64, 128, 4, 4, 2, 1024),
}


def model_config(name: str, shapes: dict[str, Shape] = SHAPES) -> PreTrainedConfig:
    """The configuration of a named shape, or of a folder or model id. Refuses misspelled shapes."""
    if name in shapes:
        return AutoConfig.for_model(**shapes[name])
    if not Path(name).exists() and (meant := did_you_mean(name, shapes)):
        raise ValueError(f"{name!r} is not one of the shapes {', '.join(shapes)}.{meant}")
    return AutoConfig.from_pretrained(name)


def training_needs(config: PreTrainedConfig, tuning: str, num_references: int, as_kernels: bool = True) -> MemoryNeeds:
    """
    The memory needs of training a model of `config` by `tuning`: `"full"`, or `"lora"` or `"qlora"` with r=16 on all
    linear layers. Weights of `num_references` reference models are added; adapters need none. Attention keeps what
    flash attention keeps on GPUs or, without `as_kernels`, what PyTorch's attention keeps on this machine.
    """
    text, is_full = config.get_text_config(), tuning == "full"
    kinds = list(zip(*(getattr(text, name, None) or [""] * text.num_hidden_layers for name in _TYPES), strict=True))
    which = list(map(kinds.index, kinds))  # for each layer, the first of its kind, which needs the same memory
    model = _first_layers(config, 1 + max(which))
    if as_kernels and upstream.takes_attention_function(model):
        upstream.set_attn_implementation(model, kept_by_kernels())
    route = choose_route(model, dtype=DTYPE, device=torch.device("cpu"))
    FlatModel.install(model, route)
    if not is_full:
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model.enable_input_require_grads()
        cast_inputs_once(get_peft_model(model, lora, autocast_adapter_dtype=tuning == "lora"), "cpu")
    with torch.autocast("cpu", DTYPE):  # as with `bf16`, TRL's default: float32 adapters multiply in bfloat16
        kept = count_kept_bytes(model, route)
    layers = recomputable_layers(model)
    parameters = [p for i in which for p in layers[i].parameters()]
    own = sum(p.numel() for p in parameters if is_full or not p.requires_grad)
    adapters = sum(p.nbytes for p in parameters if not is_full and p.requires_grad)
    embeddings = (1 if config.tie_word_embeddings else 2) * text.vocab_size * text.hidden_size * BYTES
    per_weight = BYTES_IN_4_BITS if tuning == "qlora" else BYTES
    weights = embeddings + per_weight * own
    changed = weights if is_full else adapters
    fixed = round(weights * (1 + num_references * is_full) + adapters + COPIES * changed)
    rows, columns = upstream.lm_head_tile()
    per_token = 4 * text.hidden_size
    every = kept.of(which)
    if as_kernels and not beyond_varlen(model):  # PyTorch's varlen kernel, which keeps no copies of keys
        every.kept[:, TOKENS] += every.kept[:, KEYS]
        every = replace(every, copied=every.kept[:, KEYS].max())
        every.kept[:, KEYS] = 0
    head = HeadBytes(per_token * text.vocab_size * is_full, per_token, (BYTES * columns, rows))
    return MemoryNeeds(fixed, every, head)


def _first_layers(config: PreTrainedConfig, number: int) -> PreTrainedModel:
    """A model of the first `number` layers, with a small vocabulary."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for name in _TYPES:
        own_name = text.attribute_map.get(name, name)
        if types := vars(text).get(own_name):  # others follow from the number of layers
            setattr(text, own_name, types[:number])
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = number, VOCABULARY, None
    model = AutoModelForCausalLM.from_config(small, dtype=DTYPE, attn_implementation=None)
    add_fused_lm_head(model)
    return model


class _KernelBytes(torch.autograd.Function):
    """
    Saves what flash attention saves (queries, keys and values as given, the output, one float per query and head), and
    computes nothing. PyTorch's attention on CPUs would save keys and values once for each query head.
    """

    @staticmethod
    def forward(ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_zeros(*query.shape[:3], value.size(-1))
        ctx.save_for_backward(query, key, value, output, query.new_zeros(query.shape[:3], dtype=torch.float32))
        return output


def _attend(module, query, key, value, attention_mask, **kwargs):
    return _KernelBytes.apply(query, key, value).transpose(1, 2), None


def kept_by_kernels() -> str:
    """The name of an attention function that keeps what flash attention does, see [`_KernelBytes`]."""
    AttentionInterface.register("kept_by_kernels", _attend)
    AttentionMaskInterface.register("kept_by_kernels", AttentionMaskInterface()["sdpa"])
    return "kept_by_kernels"


def features_of(tokens: float, keys: float, scored: float) -> np.ndarray:
    """The [`~trl_paddingfree.budgets.features`] of a batch of text whose attention keeps no scores."""
    features = np.zeros(len(FEATURES))
    features[[CONSTANT, TOKENS, KEYS, SCORED]] = 1, tokens, keys, scored
    return features


def features_by_layout(batches: Sequence[BatchCounts]) -> dict[str, np.ndarray]:
    """`(batches, F)` for each layout: padded, without padding, and with shared prefixes. All tokens are scored."""
    return {
        layout: np.array([features_of(counts[tokens], counts[keys], counts[tokens]) for counts in map(vars, batches)])
        for layout, (tokens, keys) in LAYOUTS.items()
    }


def step_units(task: str, tuning: str) -> int:
    """The cost of a step that recomputes nothing, in forward passes: a backward pass is 2, or 1 with frozen weights."""
    return (3 if tuning == "full" else 2) + (task in _WITH_REFERENCE)


def memory_report(
    task: str, batches: Mapping[int, Sequence[BatchCounts]], model: str, tuning: str, memory_gib: float | None
) -> dict[str, Any]:
    """Memory of the largest batch of each size, by layout; with `memory_gib` also what fits and what a budget gains."""
    units, sizes = step_units(task, tuning), []
    steps = tqdm(desc=f"Memory of {model}", total=1 + len(batches), leave=False)
    steps.set_postfix_str("making layers with random weights, and counting what they keep")
    needs = training_needs(model_config(model), tuning, task in _WITH_REFERENCE)
    for batch_size, counts in batches.items():
        steps.update()
        steps.set_postfix_str(f"batches of {batch_size}")
        row = {}
        for layout, every in features_by_layout(counts).items():
            largest = every[every[:, TOKENS].argmax()]
            peaks, (offloaded, host) = needs.peaks(largest), needs.offloaded(largest)
            row[layout] = {
                "tokens": int(largest[TOKENS]),
                "recomputed_gib": peaks[-1] / GIB,
                "kept_gib": peaks[0] / GIB,
                "offloaded_gib": offloaded / GIB,
                "host_gib": host / GIB,
            }
            if memory_gib is not None:
                row[layout] |= _within(int(memory_gib * GIB), needs, every, largest / batch_size, units)
        sizes.append({"batch_size": batch_size, **row})
    steps.close()
    return {"model": model, "tuning": tuning, "memory_gib": memory_gib, "fixed_gib": needs.fixed / GIB, "sizes": sizes}


def _within(budget: int, needs: MemoryNeeds, every: np.ndarray, example: np.ndarray, units: int) -> dict[str, float]:
    """
    What fits into a budget: the largest batch sizes, of examples like `example`, if all layers recompute and if none
    does; and the speed-up over recomputing every layer, if only as many recompute in `every (batches, F)` as must.
    """

    def fitting(number):
        return bisect_right(range(1, MOST_EXAMPLES), budget, key=lambda n: int(needs.peaks(n * example)[number]))

    tokens = every[:, TOKENS]
    recomputed = np.array([needs.fewest_recomputed(batch, budget)[0] for batch in every]) / len(needs.per_feature.kept)
    speed_up = float(tokens.sum() * (units + 1) / (tokens @ (units + recomputed)))
    return {"recomputed_batch": fitting(-1), "kept_batch": fitting(0), "speed_up": speed_up}
