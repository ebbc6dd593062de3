"""Train a random draw with padded TRL and with this package: the same comes out, or ours refuses with a reason."""

import math
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from tests.helpers.architectures import tiny_config
from tests.helpers.dpo_runs import lora
from tests.helpers.equivalence import TOLERANCE, run
from tests.helpers.head_runs import ties_broken
from tests.helpers.random_draws import draw
from tests.helpers.tiny import WORDS, make_tokenizer
from trl_paddingfree import UnprovenModelError
from trl_paddingfree.quickstart.side_by_side import Trajectory, classes_of, difference, differences

# Averaged over micro-batches: moving examples weighs their tokens anew
_MOVED = ("entropy", "logits/", "mean_token_accuracy", "min_reward", "max_reward", "clip_ratio", "kl", "vespo/")
# Gradients count relative to the largest of their tensor, or of all tensors where theirs is less than this share: that
# of keys' biases, to which attention is indifferent, is zero but for rounding
_LEAST_GRADIENT = 1e-2
# Adam divides gradients by their size, and makes whole steps of what is only rounding: a weight's difference counts in
# full if its gradient was at least this share of the largest in some step, and else in proportion
_FULL_WEIGHT = 1e-3
FLOAT64_TOLERANCE = 4e-6  # TRL's head accumulates its statistics in float32, whatever the model's dtype


# --- Data ----------------------------------------------------------------------------------------------------------


def _words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def _said(role: str, words: str, conversational: bool) -> Any:
    return [{"role": role, "content": words}] if conversational else words


def make_data(drawn: dict[str, Any], offset: int = 0) -> Dataset:
    """Rows of very different lengths, some with an edge that padding or sharing could stumble over."""
    rng, data = random.Random(drawn["data"]["seed"] + offset), drawn["data"]
    make = _ROWS[drawn["task"]]
    rows: list[dict[str, Any]] = []
    for _ in range(data["rows"]):
        rows.append(make(rng, data, rows))
    return Dataset.from_list(rows)


def _pair(rng: random.Random, data: dict, rows: list) -> dict[str, Any]:
    edge = rng.choice(
        ["", "", "", "one word", "identical", "same prompt", "no prompt", "long prompt", "nothing chosen"]
    )
    prompt, chosen, rejected = _words(rng, 1, 15), _words(rng, 1, 20), _words(rng, 1, 9)
    if edge == "one word":
        chosen, rejected = rng.choice(WORDS), rng.choice(WORDS)
    elif edge == "identical":
        rejected = chosen
    elif edge == "no prompt":
        prompt = ""
    elif edge == "long prompt":
        prompt = _words(rng, 45, 60)
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


def _instruction(rng: random.Random, data: dict, rows: list) -> dict[str, Any]:
    shape = data["format"]
    if shape == "messages":
        turns = rng.choice([1, 1, 2, 4])
        return {
            "messages": [
                {"role": role, "content": _words(rng, 0 if role == "user" else 1, 12)}
                for _ in range(turns)
                for role in ("user", "assistant")
            ]
        }
    if shape == "prompt":
        row = {
            "prompt": _said("user", _words(rng, *rng.choice([(0, 0), (1, 15), (45, 60)])), data["conversational"]),
            "completion": _said("assistant", " " + _words(rng, 1, 15), data["conversational"]),
        }
        if rows and rng.random() < 0.3:
            row["prompt"] = rng.choice(rows)["prompt"]
        return row
    if shape == "text":
        return {"text": _words(rng, *rng.choice([(1, 1), (2, 30), (60, 60)]))}
    ids = [rng.randrange(5, 69) for _ in range(rng.choice([1, 2, 8, 30, 50]))]
    if rows and rng.random() < 0.3:
        shared = rng.choice(rows)["input_ids"]
        ids = [*shared[: rng.randint(1, len(shared))], *ids]
    return {"input_ids": ids, "labels": [token if rng.random() < 0.7 else -100 for token in ids]}


def _unpaired(rng: random.Random, data: dict, rows: list) -> dict[str, Any]:
    pair = _pair(rng, data, rows)
    return {
        "prompt": pair["prompt"],
        "completion": pair[rng.choice(["chosen", "rejected"])],
        "label": rng.random() < 0.5,
    }


def _prompt(rng: random.Random, data: dict, rows: list) -> dict[str, Any]:
    if rows and rng.random() < 0.2:
        return rng.choice(rows)
    return {"prompt": _said("user", _words(rng, *rng.choice([(1, 1), (1, 15), (30, 40)])), data["conversational"])}


_ROWS: dict[str, Any] = {
    "dpo": _pair,
    "sft": _instruction,
    "reward": _pair,
    "kto": _unpaired,
    "grpo": _prompt,
    "rloo": _prompt,
}


# --- Training ------------------------------------------------------------------------------------------------------


def _arguments(drawn: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Fresh models and a tokenizer, the same each time."""
    model, reference = drawn["model"], drawn["model"]["reference"].split()[-1]
    tokenizer = make_tokenizer()
    if drawn["data"]["pad_is_eos"]:
        tokenizer.pad_token = tokenizer.eos_token
    dropout = {"attention_dropout": 0.0, "dropout": 0.0}  # padded runs draw other masks

    def make(seed: int) -> Any:
        auto = AutoModelForSequenceClassification if drawn["task"] == "reward" else AutoModelForCausalLM
        config = tiny_config(model["type"], **({"num_labels": 1} if drawn["task"] == "reward" else {}))
        torch.manual_seed(seed)
        made = auto.from_config(config, attn_implementation=model["attention"]).to(dtype)
        if made.base_model is made:  # Llama 4, whose prefix is that of the model with images
            made.base_model_prefix = "model"
        for name, value in dropout.items():
            if name in vars(made.config):
                setattr(made.config, name, value)
        return made.train()

    given: dict[str, Any] = {"model": make(model["seed"]), "processing_class": tokenizer}
    torch.manual_seed(model["seed"])
    if reference == "lora":
        given["peft_config"] = lora()
    elif reference == "adapter":
        given["model"] = get_peft_model(given["model"], lora())
    elif drawn["task"] in ("dpo", "kto"):  # a model of tests has no name that a reference could be loaded from
        given["ref_model"] = make(model["seed"] + (reference == "given"))
    if drawn["task"] in ("grpo", "rloo"):
        given["reward_funcs"] = _length_and_letters
    return given


def _length_and_letters(completions: list, **kwargs: Any) -> list[float]:
    """A reward that says nothing, and says it of each completion anew."""
    words = [said if isinstance(said, str) else said[0]["content"] for said in completions]
    return [float(sum(map(ord, said)) % 7) for said in words]


class Gradients(TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def train(drawn: dict[str, Any], is_ours: bool, dtype: torch.dtype) -> tuple[Trajectory, list[dict[str, torch.Tensor]]]:
    arguments, gradients = _arguments(drawn, dtype), Gradients()
    arguments["callbacks"] = [gradients]
    options = {"learning_rate": 5e-3, "disable_tqdm": True, **drawn["options"]}
    arguments["eval_dataset"] = make_data(drawn, offset=1) if "eval_strategy" in options else None
    torch.manual_seed(0)  # completions are drawn alike
    with tempfile.TemporaryDirectory(prefix="random_draw_") as folder, ties_broken():
        trained = run(
            *classes_of(drawn["task"], is_ours),
            model=arguments.pop("model"),
            train_dataset=make_data(drawn),
            steps=2,
            trainer_kwargs=arguments,
            output_dir=folder,
            **options,
            **(drawn["ours"] if is_ours else {}),
        )
    return trained, gradients.steps


def off_by(
    padded: Trajectory,
    ours: Trajectory,
    tolerance: float,
    ignored: tuple[str, ...] = (),
    gradients: Sequence[list[dict[str, torch.Tensor]]] = ((), ()),
) -> dict[str, float]:
    """
    By how many tolerances each logged figure, each weight, and each of the `gradients` of optimizer steps, if given,
    is off; those within the tolerance left out.
    """
    if len(padded.log_history) != len(ours.log_history) or padded.weights.keys() != ours.weights.keys():
        return {"number of logs or weights": math.inf}
    found, counted = {}, {}
    # Of all steps: one that draws identical pairs only has gradients that are nothing but rounding
    largest = (
        max((float(gradient.abs().max()) for step in gradients[0] for gradient in step.values()), default=0) or 1.0
    )
    for step, (theirs, mine) in enumerate(zip(*gradients, strict=True)):
        for name, gradient in theirs.items():
            found[f"gradient {step} of {name}"] = difference(gradient, mine[name], _LEAST_GRADIENT * largest)
            share = (gradient.abs() / (_FULL_WEIGHT * largest)).clamp(max=1)
            counted[name] = torch.maximum(share, counted.get(name, share))
    for name, weight in padded.weights.items():
        share = counted.get(name, torch.ones(()))
        found[name] = difference(weight, torch.lerp(weight, ours.weights[name], share.to(weight)))
    for step, logs in enumerate(zip(padded.log_history, ours.log_history, strict=True)):
        for name, off in differences(*([log] for log in logs)).items():
            if not any(part in name for part in ignored):
                found[f"{name} of log {step}"] = off
    return {name: off / tolerance for name, off in found.items() if off > tolerance}


def _ignored(drawn: dict[str, Any]) -> tuple[str, ...]:
    ignored = _MOVED if drawn["ours"]["arrange_micro_batches"] != "none" else ()
    if ignored and drawn["task"] == "kto":  # a micro-batch has any number of desirable examples
        ignored = (*ignored, "logps/", "rewards/")
    if drawn["options"].get("packing"):  # TRL counts the padding of `pad_to_multiple_of` in packed rows
        ignored = (*ignored, "num_tokens") if drawn["options"]["pad_to_multiple_of"] else ignored
    # Rewards that are equal but for rounding: which is larger is nothing to compare
    return (*ignored, "rewards/accuracies", "accuracy") if drawn["task"] in ("dpo", "reward") else ignored


def outcome(seed: int) -> dict[str, Any]:
    """
    Run the draw of a seed both ways.

    Returns:
        `dict[str, Any]`: The draw, and its `"verdict"`:
        `"same"`, `"same in float64"` (rounding: the difference is gone with more digits), `"different"` with
        `"differences"`, `"refused"` by us with the `"reason"`, `"TRL refuses"`, or `"failed"` (ours only, not by a
        refusal).
    """
    drawn, started = draw(seed), time.perf_counter()
    result = {**drawn, **_verdict(drawn)}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def _verdict(drawn: dict[str, Any]) -> dict[str, Any]:
    found = _compared(drawn, torch.float32, TOLERANCE)
    if found["verdict"] != "different":
        return found
    again = _compared(drawn, torch.float64, FLOAT64_TOLERANCE)
    if again["verdict"] == "same":
        return {"verdict": "same in float64", "in_float32": found["differences"]}
    return again


def _compared(drawn: dict[str, Any], dtype: torch.dtype, tolerance: float) -> dict[str, Any]:
    try:
        padded, theirs = train(drawn, False, dtype)
    except Exception as error:  # noqa: BLE001 (whatever TRL cannot do is nothing to compare with)
        return {"verdict": "TRL refuses", "reason": _said_by(error)}
    try:
        ours, mine = train(drawn, True, dtype)
    except Exception as error:  # noqa: BLE001 (reported as a failure, unless it names an option)
        is_refusal = isinstance(error, UnprovenModelError) or (isinstance(error, ValueError) and "`" in str(error))
        return {"verdict": "refused" if is_refusal else "failed", "reason": _said_by(error)}
    off = off_by(padded, ours, tolerance, _ignored(drawn), (theirs, mine))
    if off:
        return {"verdict": "different", "dtype": str(dtype), "differences": off}
    return {"verdict": "same", "method": ours.trainer.method}


def _said_by(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
