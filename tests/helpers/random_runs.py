"""Train a random draw with padded TRL and with this package: the same comes out, or ours refuses with a reason."""

import random
import tempfile
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from tests.helpers.architectures import tiny_config
from tests.helpers.flat_and_padded import gradients_of
from tests.helpers.float64 import TOLERANCE, float64_throughout, in_float64
from tests.helpers.random_draws import EAGER_ONLY, ONLINE, draw
from tests.helpers.tiny import WORDS, lora, make_tokenizer, score, text
from tests.helpers.vision import (
    ARCHITECTURES,
    make_vision,
    vision_completions,
    vision_labelled,
    vision_messages,
    vision_pairs,
    vision_prompts,
)
from tests.runs import Run, off_by, run
from trl_paddingfree import UnprovenModelError
from trl_paddingfree.registry import TRAINERS

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Parts of the names of figures that differ between any two runs, or that looks add
MEASURED = ("time", "second", "memory", "check_error")
# Averaged over micro-batches: moving examples weighs their tokens anew
_MOVED = ("entropy", "logits/", "mean_token_accuracy", "min_reward", "max_reward", "clip_ratio", "kl", "vespo/")


# --- Data ----------------------------------------------------------------------------------------------------------


def _said(role, words, conversational):
    return [{"role": role, "content": words}] if conversational else words


def make_data(drawn: dict[str, Any], offset: int = 0) -> Dataset:
    """Rows of very different lengths, some with an edge that padding or sharing could stumble over."""
    data, seed = drawn["data"], drawn["data"]["seed"] + offset
    if drawn["model"]["type"] in ARCHITECTURES:
        return _IMAGES.get(data.get("format", drawn["task"]), vision_prompts)(data["rows"], seed)
    rng = random.Random(seed)
    make = _ROWS.get(drawn["task"], _prompt)
    rows = []
    for _ in range(data["rows"]):
        rows.append(make(rng, data, rows))
    return Dataset.from_list(rows)


def _pair(rng, data, rows):
    edge = rng.choice(
        ["", "", "", "one word", "identical", "same prompt", "no prompt", "long prompt", "nothing chosen"]
    )
    prompt, chosen, rejected = text(rng, 1, 15), text(rng, 1, 20), text(rng, 1, 9)
    if edge == "one word":
        chosen, rejected = rng.choice(WORDS), rng.choice(WORDS)
    elif edge == "identical":
        rejected = chosen
    elif edge == "no prompt":
        prompt = ""
    elif edge == "long prompt":
        prompt = text(rng, 45, 60)
    elif edge == "nothing chosen":
        chosen = ""
    space = "" if data["conversational"] else " "
    row = {
        "prompt": _said("user", prompt, data["conversational"]),
        "chosen": _said("assistant", space + chosen, data["conversational"]),
        "rejected": _said("assistant", space + rejected, data["conversational"]),
    }
    if edge == "same prompt" and rows:
        row["prompt"] = rng.choice(rows)["prompt"]
    return row


def _instruction(rng, data, rows):
    shape = data["format"]
    if shape == "messages":
        roles = ("user", "assistant") * rng.choice([1, 1, 2, 4])
        return {"messages": [{"role": role, "content": text(rng, int(role == "assistant"), 12)} for role in roles]}
    if shape == "prompt":
        row = {
            "prompt": _said("user", text(rng, *rng.choice([(0, 0), (1, 15), (45, 60)])), data["conversational"]),
            "completion": _said("assistant", " " + text(rng, 1, 15), data["conversational"]),
        }
        if rows and rng.random() < 0.3:
            row["prompt"] = rng.choice(rows)["prompt"]
        return row
    if shape == "text":
        return {"text": text(rng, *rng.choice([(1, 1), (2, 30), (60, 60)]))}
    ids = [rng.randrange(5, 69) for _ in range(rng.choice([1, 2, 8, 30, 50]))]
    if rows and rng.random() < 0.3:
        shared = rng.choice(rows)["input_ids"]
        ids = [*shared[: rng.randint(1, len(shared))], *ids]
    return {"input_ids": ids, "labels": [token if rng.random() < 0.7 else -100 for token in ids]}


def _unpaired(rng, data, rows):
    pair = _pair(rng, data, rows)
    return {
        "prompt": pair["prompt"],
        "completion": pair[rng.choice(["chosen", "rejected"])],
        "label": rng.random() < 0.5,
    }


def _prompt(rng, data, rows):
    if rows and rng.random() < 0.2:
        return rng.choice(rows)
    return {"prompt": _said("user", text(rng, *rng.choice([(1, 1), (1, 15), (30, 40)])), data["conversational"])}


_IMAGES = {"dpo": vision_pairs, "messages": vision_messages, "prompt": vision_completions, "kto": vision_labelled}
_ROWS = {"dpo": _pair, "reward": _pair, "sft": _instruction, "kto": _unpaired}


# --- Training ------------------------------------------------------------------------------------------------------


def _arguments(drawn, dtype):
    """Fresh models and a tokenizer, the same each time."""
    model, reference = drawn["model"], drawn["model"]["reference"].split()[-1]
    tokenizer = make_tokenizer()
    if model["type"] in ARCHITECTURES:
        tokenizer = make_vision(model["type"])[1]
        tokenizer.tokenizer.padding_side = "left" if drawn["task"] in ONLINE else "right"
    elif drawn["data"]["pad_is_eos"]:
        tokenizer.pad_token = tokenizer.eos_token

    def make(seed, model_type=model["type"]):
        torch.manual_seed(seed)
        if model_type in ARCHITECTURES:
            made = make_vision(model_type, seed)[0]
        else:
            auto = AutoModelForSequenceClassification if drawn["task"] == "reward" else AutoModelForCausalLM
            config = tiny_config(model_type, **({"num_labels": 1} if drawn["task"] == "reward" else {}))
            attention = "eager" if model_type in EAGER_ONLY else model["attention"]
            made = auto.from_config(config, attn_implementation=attention)
        if made.base_model is made:  # Llama 4, whose prefix is that of the model with images
            made.base_model_prefix = "model"
        if drawn.get("dropout"):
            for module in made.modules():
                for name in ("attention_dropout", "p"):
                    if isinstance(vars(module).get(name), float):
                        setattr(module, name, drawn["dropout"])
        return in_float64(made).to(dtype).train()

    given = {"model": make(model["seed"]), "processing_class": tokenizer}
    torch.manual_seed(model["seed"])
    if reference == "lora":
        given["peft_config"] = lora()
    elif reference == "adapter":
        given["model"] = get_peft_model(given["model"], lora())
    elif drawn["task"] in ("dpo", "kto"):  # a model of tests has no name that a reference could be loaded from
        given["ref_model"] = make(model["seed"] + (reference == "given"))
    if drawn["task"] in ("grpo", "rloo"):
        given["reward_funcs"] = score
    if drawn["task"] == "distillation":
        given["teacher_model"] = make(model["seed"] + 1, model["teacher"])
    return given


class _Gradients(TrainerCallback):
    """Keeps the gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients_of(model))


def train(drawn: dict[str, Any], is_ours: bool, dtype: torch.dtype = torch.float64, **options: Any) -> Run:
    """Train a draw, by this package or padded TRL, in a dtype and with other `options`."""
    given = {**_arguments(drawn, dtype), **drawn["options"], **(drawn["ours"] if is_ours else {}), **options}
    given["eval_dataset"] = make_data(drawn, offset=1) if "eval_strategy" in given else None
    with tempfile.TemporaryDirectory(prefix="random_draw_") as folder:
        given |= {"train_dataset": make_data(drawn), "output_dir": folder, "steps": 2}
        kept = _Gradients()
        result = run(drawn["task"], "ours" if is_ours else "padded", callbacks=[kept], **given)
    return replace(result, gradients=kept.steps)


def _ignored(drawn):
    ignored = _MOVED if drawn["ours"]["arrange_micro_batches"] != "none" else ()
    if ignored and drawn["task"] == "kto":  # a micro-batch has any number of desirable examples
        ignored = (*ignored, "logps/", "rewards/")
    if drawn["options"].get("packing"):  # TRL counts the padding of `pad_to_multiple_of` in packed rows
        ignored = (*ignored, "num_tokens") if drawn["options"]["pad_to_multiple_of"] else ignored
    # Rewards that are equal but for rounding: which is larger is nothing to compare
    return (*ignored, "rewards/accuracies", "accuracy") if drawn["task"] in ("dpo", "reward") else ignored


@float64_throughout()
def outcome(seed: int) -> dict[str, Any]:
    """
    Run the draw of a seed both ways, in float64, in which Adam makes no whole steps of rounding.

    Returns:
        `dict[str, Any]`: The draw, and its `"verdict"`: `"same"`, `"different"` with `"differences"`, `"refused"` by us
        with the `"reason"`, `"TRL refuses"`, or `"failed"` (ours only, not by a refusal).
    """
    drawn = draw(seed)
    try:
        padded = train(drawn, False)
    except Exception as error:  # noqa: BLE001 (whatever TRL cannot do is nothing to compare with)
        return {**drawn, "verdict": "TRL refuses", "reason": _said_by(error)}
    try:
        ours = train(drawn, True)
    except Exception as error:  # noqa: BLE001 (reported as a failure, unless it names an option)
        is_refusal = isinstance(error, UnprovenModelError) or (isinstance(error, ValueError) and "`" in str(error))
        return {**drawn, "verdict": "refused" if is_refusal else "failed", "reason": _said_by(error)}
    if off := off_by(padded, ours, TOLERANCE, _ignored(drawn)):
        return {**drawn, "verdict": "different", "differences": off}
    return {**drawn, "verdict": "same", "method": ours.trainer.method}


def outcome_of_looks(seed: int) -> dict[str, Any]:
    """
    Run the draw of a seed without looks at its batches and with one at each step, in float64, float32 or bfloat16: all
    bits of weights, gradients and figures have to be the same.

    Returns:
        `dict[str, Any]`: As of [`outcome`], with the `"dtype"`, and how many `"looks"` there were at how many `"rows"`.
        The `"verdict"` is `"alarm"` if a look ends training.
    """
    drawn = draw(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    drawn["dtype"] = str(dtype).removeprefix("torch.")
    rng = random.Random(f"noise {seed}")
    drawn["dropout"] = rng.choice([0.0, 0.0, 0.1])
    if "disable_dropout" in {field.name for field in fields(TRAINERS[drawn["task"]].config_class)}:
        drawn["options"]["disable_dropout"] = not drawn["dropout"]
    drawn["options"]["neftune_noise_alpha"] = rng.choice([None, None, 5.0])
    with float64_throughout() if dtype == torch.float64 else nullcontext():
        try:
            without = train(drawn, True, dtype, check_steps=0)
        except Exception as error:  # noqa: BLE001 (whatever cannot be trained is nothing to look at)
            return {**drawn, "verdict": "refused", "reason": _said_by(error)}
        try:
            looked = train(drawn, True, dtype, check_steps=1)
        except UnprovenModelError as error:
            return {**drawn, "verdict": "alarm", "reason": _said_by(error)}
        except Exception as error:  # noqa: BLE001 (reported as a failure)
            return {**drawn, "verdict": "failed", "reason": _said_by(error)}
    looks = looked.trainer._looks.found
    drawn |= {"looks": looks.number, "rows": looks.rows, "error": looks.largest_error, "missing": looks.not_compared}
    if off := other_bits(without, looked):
        return {**drawn, "verdict": "different", "differences": off}
    return {**drawn, "verdict": "same", "method": looked.trainer.method}


def other_bits(one: Run, other: Run) -> list[str]:
    """The names of the weights, gradients and logged figures that two runs do not have bit for bit in common."""

    def same(x, y):
        return torch.equal(x, y) or (torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()))

    named = [(f"gradient {i} of ", x, y) for i, (x, y) in enumerate(zip(one.gradients, other.gradients, strict=True))]
    off = [
        prefix + name
        for prefix, x, y in [("", one.weights, other.weights), *named]
        for name in x.keys() | y.keys()
        if not (name in x and name in y and same(x[name], y[name]))
    ]
    for step, (x, y) in enumerate(zip(one.log_history, other.log_history, strict=True)):
        names = {name for name in x.keys() | y.keys() if not any(part in name for part in MEASURED)}
        off += [f"{name} of log {step}" for name in names if repr(x.get(name)) != repr(y.get(name))]
    return off


def _said_by(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
