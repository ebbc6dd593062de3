"""Random draws over tasks, models, data and options.

A draw is a dict of plain values that its seed alone decides, so that any of them can be repeated by its number;
[`tests.helpers.random_runs`] trains it.
"""

import random
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

from tests.helpers.vision import ARCHITECTURES

MODEL_TYPES = [
    *("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "olmo2", "phi3", "falcon"),
    *("opt", "starcoder2", "cohere2", "gpt_oss", "llama4_text", "stablelm", "granite", "qwen3_moe", "smollm3"),
]
# Layers that carry state, beside attention or alone
HYBRIDS = ["qwen3_next", "falcon_h1", "lfm2", "mamba2", "zamba2"]
NO_ADAPTER = ("falcon_h1", "mamba2", "zamba2")  # PEFT refuses to adapt all of their layers
EAGER_ONLY = ("gemma2", "gpt_oss", "mamba2")
# Those with positions of their own, or queries that they scale: padding on the left, which TRL puts before prompts,
# moves them in padded TRL
ABSOLUTE = ("gpt2", "opt", "llama4_text")
ONLINE = ("grpo", "rloo", "distillation")  # those that generate their rows
TASKS = ["dpo", "sft", "reward", "kto", *ONLINE]
# Where TRL itself keeps packed documents apart, so that there is something to compare with
PACKABLE = ("llama", "qwen3", "olmo2", "starcoder2", "granite", "gpt2")
LOSSES = [
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
]
WITH_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
REFERENCES = ["itself", "given", "lora", "adapter", "precomputed given", "precomputed lora"]


def draw(seed: int) -> dict[str, Any]:
    """The draw of a seed: `task`, `model`, `data`, `ours` (options of this package), `options` (those of TRL)."""
    rng = random.Random(seed)
    task = rng.choice(TASKS)
    known = [name for name in MODEL_TYPES + HYBRIDS if task != "reward" or name in CLASSIFIERS]
    model = {"type": rng.choice([x for x in known if task not in ONLINE or x not in ABSOLUTE])}
    model["seed"] = rng.randrange(1000)
    model["attention"] = "eager" if model["type"] in EAGER_ONLY else rng.choice(["sdpa", "eager"])
    options = _common_options(rng)
    data = {"rows": rng.randint(5, 14), "seed": rng.randrange(10**6), "conversational": rng.random() < 0.5}
    data["pad_is_eos"] = rng.random() < 0.3
    references = REFERENCES if task in ("dpo", "kto") else ["itself", "lora"]
    refused = ("lora", "adapter") if model["type"] in NO_ADAPTER else ()
    model["reference"] = rng.choice([name for name in references if not name.endswith(refused)])
    specific = _SPECIFIC[task](rng, model, options, data)
    drawn = {"seed": seed, "task": task, "model": model, "data": data, "ours": _our_options(rng, task, model["type"])}
    if random.Random(f"compiled {seed}").random() < 0.1:
        drawn["ours"]["torch_compile_backend"] = "aot_eager"
    if model["type"] == "llama4_text":
        specific["router_aux_loss_coef"] = 0.0  # TRL's router loss finds no number of experts
    images = random.Random(f"images {seed}")
    if task != "reward" and data.get("format", "prompt") in ("messages", "prompt") and images.random() < 0.2:
        model["type"] = model["teacher"] = images.choice([*ARCHITECTURES])
        drawn["ours"]["arrange_micro_batches"] = "none"  # by lengths, which are not known before images are read
        for name in {"max_length", "packing", "assistant_only_loss", "precompute_ref_log_probs"} & specific.keys():
            specific[name] = None
        options["pad_to_multiple_of"] = None
    return {**drawn, "options": {**options, **specific}}


def _common_options(rng):
    options = {
        "per_device_train_batch_size": rng.randint(1, 5),
        "gradient_accumulation_steps": rng.choice([1, 1, 2, 3]),
        "gradient_checkpointing": rng.random() < 0.4,
        "gradient_checkpointing_kwargs": {"use_reentrant": rng.random() < 0.3},
        "pad_to_multiple_of": rng.choice([None, None, 8]),
        "train_sampling_strategy": rng.choice(["random", "random", "sequential"]),
        "dataloader_drop_last": rng.random() < 0.2,
        "max_grad_norm": rng.choice([0.0, 1.0]),
        "optim": rng.choice(["adamw_torch", "sgd"]),
        "seed": rng.randrange(1000),
    }
    if rng.random() < 0.3:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": rng.randint(1, 4)}
    return options


def _our_options(rng, task, model_type):
    is_online = task in ONLINE  # the lengths of rows are not known beforehand
    ours = {
        "prefix_sharing": rng.random() < 0.7,
        "flat_attention": rng.choice(["auto", "auto", "auto" if model_type == "falcon" else "segment", "mask"]),
        "arrange_micro_batches": rng.choice([*["none"] * 4, "prefix" if is_online else "tokens", "prefix"]),
    }
    if rng.random() < 0.25:  # in GiB, and a tiny model: from too little for one example to more than enough
        return {**ours, "memory_budget": rng.choice([0.006, 0.012, 0.02, 1.0])}
    return {**ours, "max_tokens_per_micro_batch": rng.choice([None, None, 12, 40])}


def _lengths(rng):
    return {
        "max_length": rng.choice([None, 6, 12, 24, 40, 1024]),
        "truncation_mode": rng.choice(["keep_start", "keep_end"]),
    }


def _dpo_options(rng, model, options, data):
    losses = rng.sample(LOSSES, rng.choice([1, 1, 1, 2, 3]))
    specific = {
        "loss_type": losses,
        "beta": rng.choice([0.01, 0.1, 0.5, 1.0]),
        "label_smoothing": 0.1 if "exo_pair" in losses else rng.choice([0.0, 0.0, 0.1, 0.3]),
        "ld_alpha": rng.choice([None, None, 0.0, 0.5]),
        # With these, TRL refuses weights, or multiplies what its gradient needs in place
        "use_weighting": rng.random() < 0.25 and not {"aot", "aot_unpaired", "hinge"} & set(losses),
        "precompute_ref_log_probs": model["reference"].startswith("precomputed"),
        **_lengths(rng),
    }
    if len(losses) > 1:
        specific["loss_weights"] = [rng.choice([0.3, 1.0, 2.0]) for _ in losses]
    if set(losses) <= WITH_DIVERGENCE and rng.random() < 0.4:
        specific["f_divergence_type"] = rng.choice(["forward_kl", "js_divergence", "alpha_divergence"])
    return specific


def _sft_options(rng, model, options, data):
    data["format"] = rng.choice(["messages", "prompt", "text", "input_ids"])
    data["conversational"] = data["format"] in ("messages", "input_ids") or data["conversational"]
    options["label_smoothing_factor"] = rng.choice([0.0, 0.0, 0.0, 0.1])
    specific = {"loss_type": rng.choice(["nll", "nll", "dft"]), **_lengths(rng)}
    if data["format"] == "messages":
        specific["assistant_only_loss"] = rng.random() < 0.5
    elif data["format"] == "prompt":
        specific["completion_only_loss"] = rng.choice([None, True, False])
    if model["type"] in PACKABLE and rng.random() < 0.5:
        model["attention"] = "sdpa"
        specific |= {
            "packing": True,
            "max_length": rng.choice([24, 40]),
            "packing_strategy": rng.choice(["bfd", "bfd_split", "wrapped"]),
        }
    return specific


def _reward_options(rng, model, options, data):
    # A common shift of all rewards has no gradient: Adam would make steps of its rounding. Larger steps than these
    # diverge where rewards are pulled to zero, and rounding with them
    options |= {"optim": "sgd", "learning_rate": 0.02}
    return {
        "center_rewards_coefficient": rng.choice([None, None, 0.01, 0.1]),
        "max_length": rng.choice([None, 24, 40, 1024]),  # rows that are longer are left out
    }


def _kto_options(rng, model, options, data):
    loss_type = rng.choice(["kto", "apo_zero_unpaired"])
    if loss_type == "kto":  # which compares the rows of a batch, as they lie in the data
        options["train_sampling_strategy"] = "sequential"
        options["per_device_train_batch_size"] = rng.randint(2, 5)
    return {
        "loss_type": loss_type,
        "beta": rng.choice([0.01, 0.1, 0.5]),
        "desirable_weight": rng.choice([1.0, 1.3]),
        "undesirable_weight": rng.choice([1.0, 0.6]),
        "max_length": rng.choice([None, 6, 12, 24, 40, 1024]),
        "precompute_ref_log_probs": model["reference"].startswith("precomputed"),
    }


def _online_options(rng, model, options, data):
    generations = rng.choice([2, 2, 4])
    options["per_device_train_batch_size"] = generations * rng.choice([1, 1, 2])
    if "per_device_eval_batch_size" in options:
        options["per_device_eval_batch_size"] = generations
    options.pop("dataloader_drop_last")
    return {
        "num_generations": generations,
        "max_completion_length": rng.choice([1, 5, 9]),
        "temperature": rng.choice([1.0, 0.7]),
        # Without an adapter, TRL loads the reference by the model's name, and a model of tests has none
        "beta": rng.choice([0.0, 0.05]) if model["reference"] == "lora" else 0.0,
        "num_iterations": rng.choice([1, 1, 2]),
        "mask_truncated_completions": rng.random() < 0.2,
        "epsilon": rng.choice([0.2, 0.05]),
    }


def _grpo_options(rng, model, options, data):
    return {
        **_online_options(rng, model, options, data),
        "loss_type": rng.choice(["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"]),
        "importance_sampling_level": rng.choice(["token", "token", "sequence"]),
        "scale_rewards": rng.choice(["group", "batch", "none"]),
        "top_entropy_quantile": rng.choice([1.0, 1.0, 0.5]),
        "delta": rng.choice([None, None, 1.5]),
    }


def _rloo_options(rng, model, options, data):
    return {**_online_options(rng, model, options, data), "normalize_advantages": rng.random() < 0.5}


def _distillation_options(rng, model, options, data):
    model["teacher"] = rng.choice([model["type"], "llama", "gpt_neox"])
    return {
        "beta": rng.choice([0.0, 0.0, 0.3, 1.0]),
        "temperature": rng.choice([1.0, 0.7]),
        "max_completion_length": rng.choice([1, 5, 9]),
        "shuffle_dataset": rng.random() < 0.7,
    }


_SPECIFIC = {
    "dpo": _dpo_options,
    "sft": _sft_options,
    "reward": _reward_options,
    "kto": _kto_options,
    "grpo": _grpo_options,
    "rloo": _rloo_options,
    "distillation": _distillation_options,
}
