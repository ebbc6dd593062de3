"""Each trainer beside padded TRL, flat and with shared prefixes: one table of models, data and options."""

import ast
import json
import random
import re

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import BitsAndBytesConfig, TrainerCallback

from tests.helpers.random_draws import LOSSES, WITH_DIVERGENCE
from tests.helpers.tiny import (
    CHAT_TEMPLATE,
    DATA,
    EXPERTS,
    SEED,
    arguments,
    conversations,
    different_pairs,
    following_rotary,
    lora,
    make_model,
    make_tokenizer,
    preference_data,
    prompt_completions,
    prompts,
    reward_model,
)
from tests.runs import LAYOUTS, PER_MICRO_BATCH, ROUNDED, assert_same, compare, run

DIVERGENT = sorted(WITH_DIVERGENCE)
RECOMPUTED, REENTRANT = (
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": x}} for x in (False, True)
)
MOVED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "num_train_epochs": 2, "steps": 4}
MOVED |= {"ignored": (*ROUNDED, *PER_MICRO_BATCH)}
TOOL = {"type": "function", "function": {"name": "w3", "description": "w4 w5", "parameters": {}}}


# --- models -----------------------------------------------------------------------------------------------------------


def of_folder(folder):
    """As users name a model: TRL loads the reference from there, too."""
    return {"model": folder}


def adapter(folder):
    return {"model": get_peft_model(make_model(), lora(lora_alpha=16)), "processing_class": make_tokenizer()}


def model(task, model_type="llama", adapters=False, **overrides):
    """Arguments with a model of another kind; of models beside it, too."""

    def make(folder):
        made = (reward_model if task == "reward" else make_model)(model_type, **overrides)
        return arguments(task, adapters, made, make=lambda seed: make_model(model_type, seed=seed, **overrides))

    return make


def teacher(model_type, **overrides):
    return lambda folder: {**arguments("distillation", False), "teacher_model": make_model(model_type, **overrides)}


def adapted(**options):
    return lambda folder: {**arguments("sft"), "peft_config": lora(**options)}


def quantized(folder):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return {"model": folder, "peft_config": lora(), "quantization_config": config}


class InFloat32(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


# It keeps adapters in bfloat16: an update may fall to either side of a rounding boundary, and the best token be a tie
QLORA = {"make": quantized, "tolerance": 2**-7, "ignored": (*ROUNDED, "mean_token_accuracy")}
QLORA_IN_FLOAT32 = {"make": lambda folder: {**quantized(folder), "callbacks": [InFloat32()]}}
EMBEDDINGS = {"make": adapted(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])}


def with_tools_in_template(folder):
    template = "{% for tool in tools or [] %}system {{ tool['function']['description'] }} {% endfor %}"
    loud = "{% if loud %}w59 w59 {% endif %}"
    return {**arguments("dpo"), "processing_class": make_tokenizer(template + loud + CHAT_TEMPLATE)}


def padded_with_eos(folder):
    made = arguments("reward", False)
    made["processing_class"].pad_token = made["processing_class"].eos_token
    return made


# --- data -------------------------------------------------------------------------------------------------------------


def twice(n, seed):
    """Prompts that come twice each."""
    return prompts(n // 2, seed).select([i for i in range(n // 2) for _ in range(2)])


def language_modeling(n, seed):
    return Dataset.from_list([{"text": row["prompt"] + row["completion"]} for row in prompt_completions(n, seed)])


def turn_by_turn(n, seed):
    """One sample per assistant turn: each continues the one before it."""
    rows = []
    for row in conversations(n, seed):
        rows += [{"messages": row["messages"][: end + 1]} for end in range(1, len(row["messages"]), 2)]
    return Dataset.from_list(rows)


def tokenized(n, seed):
    """What `skip_prepare_dataset` expects: token ids, and labels of which some are -100."""
    rng, rows = random.Random(seed), []
    for _ in range(n):
        ids = [rng.randint(5, 60) for _ in range(rng.randint(2, 20))]
        rows.append({"input_ids": ids, "labels": [t if rng.random() < 0.7 else -100 for t in ids]})
    return Dataset.from_list(rows)


def with_tools(make, **columns):
    """Conversations whose templates are told of a tool."""
    return lambda n, seed: make(n, seed).map(lambda _: {"tools": json.dumps([TOOL]), **columns})


def streamed(task):
    return lambda n, seed: DEFAULTS[task]["data"](n, seed).to_iterable_dataset()


# --- cases ------------------------------------------------------------------------------------------------------------

DEFAULTS = {
    # Always the same pairs: some losses divide rounding by next to nothing. Random draws have others
    "dpo": {"data": lambda n, seed: preference_data(12, 40417)},
    "sft": {"data": conversations, "max_length": 24, "adapters": False},
    "reward": {"data": different_pairs, "adapters": False},
    "kto": {"data": DATA["kto"]},
    "grpo": {"data": prompts, "layouts": "shared", "adapters": False},
    "rloo": {"data": prompts},
    "distillation": {"data": twice, "adapters": False},
}
CASES = {
    "dpo": {
        "full fine-tuning": {"make": of_folder},
        "reference": {"adapters": False},
        "adapter, TRL's copy": {"make": adapter},
        "embeddings and head": EMBEDDINGS,
        "precomputed": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3},
        "precomputed, adapter": {"make": adapter, "precompute_ref_log_probs": True},
        "synced": {"make": of_folder, "sync_ref_model": True, "ref_model_sync_steps": 1, "steps": 4},
        "plain text": {"data": lambda n, seed: preference_data(12, 40417, conversational=False)},
        "recomputed": RECOMPUTED,
        "reentrant": REENTRANT,
        "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        # trl#5305, also #5350, #5362, ms-swift#5665, and trl#3398: `keep_end` with padding-free zeroed samples
        "keep_start": {"max_length": 14, "truncation_mode": "keep_start"},
        "keep_end": {"max_length": 14, "truncation_mode": "keep_end"},
        "pad_to_multiple_of": {"pad_to_multiple_of": 16},
        "batches of one": {"per_device_train_batch_size": 1, "steps": 5},
        "workers": {"dataloader_num_workers": 1},
        "tools": {
            "make": with_tools_in_template,
            "data": with_tools(preference_data, chat_template_kwargs={"loud": True}),
        },
        "mixtral": {"make": model("dpo", "mixtral", **EXPERTS), "router_aux_loss_coef": 0.5},
        "qlora": QLORA,
        "qlora in float32": QLORA_IN_FLOAT32,
        "moved": {"ours": {"arrange_micro_batches": "tokens"}, **MOVED},
        "moved by prefix": {"ours": {"arrange_micro_batches": "prefix"}, **MOVED},
        "parts": {"ours": {"max_tokens_per_micro_batch": 130}, "per_device_train_batch_size": 6},
        "stream, slices": {"data": streamed("dpo"), "ours": {"max_tokens_per_micro_batch": 10}},
        **{loss: {"loss_type": loss, "label_smoothing": 0.1} for loss in LOSSES},
        "all losses": {"loss_type": LOSSES, "label_smoothing": 0.3},
        "robust without smoothing": {"loss_type": "robust"},
        **{
            kind: {"f_divergence_type": kind, "loss_type": DIVERGENT, "label_smoothing": 0.1, **more}
            for kind, more in {
                "forward_kl": {},
                "js_divergence": {},
                "alpha_divergence": {"f_alpha_divergence_coef": 0.7},
            }.items()
        },
        # WPO's weights are tiny for a random model: large `loss_weights` bring the loss back to about 1
        "weighted": {
            "use_weighting": True,
            "loss_type": ["sigmoid", "ipo", "bco_pair", "nca_pair"],
            "loss_weights": [60.0, 30.0, 60.0, 60.0],
        },
        "ld_alpha": {"ld_alpha": 0.4, "loss_type": ["sigmoid", "ipo", "sft"]},  # also ms-swift#10072
        "ld_alpha, weighted": {
            "ld_alpha": 0.6,
            "use_weighting": True,
            "loss_type": "sigmoid_norm",
            "loss_weights": [200.0],
        },
        "ld_alpha, precomputed": {"ld_alpha": 0.4, "precompute_ref_log_probs": True},
    },
    "sft": {
        "conversations": {},
        "assistant, keep_end": {"assistant_only_loss": True, "truncation_mode": "keep_end"},
        "prompts": {"data": prompt_completions},
        "prompts, all scored": {"data": prompt_completions, "completion_only_loss": False, "pad_to_multiple_of": 8},
        "dft": {"data": language_modeling, "loss_type": "dft"},
        "label smoothing": {
            "make": model("sft", "modernbert-decoder"),  # whose `get_decoder` gives a part of its head
            "data": language_modeling,
            "label_smoothing_factor": 0.1,
        },
        "turns": {"data": turn_by_turn, "assistant_only_loss": True, "gradient_accumulation_steps": 2},
        "tools": {"data": with_tools(conversations)},
        "tokenized": {"data": tokenized, "dataset_kwargs": {"skip_prepare_dataset": True}},
        "formatted": {
            "data": prompt_completions,
            "formatting_func": lambda row: row["prompt"] + " w0 " + row["completion"],
            "completion_only_loss": False,
        },
        "recomputed": RECOMPUTED,
        "reentrant": REENTRANT,
        "by process": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3},
        "moved": {"ours": {"arrange_micro_batches": "tokens"}, **MOVED},
        "moved by prefix": {"ours": {"arrange_micro_batches": "prefix"}, **MOVED},
        "moved by length": {
            "ours": {"arrange_micro_batches": "tokens"},
            "train_sampling_strategy": "group_by_length",
            "accelerator_config": {"use_seedable_sampler": False},
            **MOVED,
        },
        "parts": {"ours": {"max_tokens_per_micro_batch": 100}, "per_device_train_batch_size": 8},
        "qlora": {**QLORA, "steps": 1},
        "qlora in float32": QLORA_IN_FLOAT32,
        "embeddings": EMBEDDINGS,
        "tokens": {"make": adapted(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]})},
        "adapted embeddings": {"make": adapted(target_modules=["q_proj", "embed_tokens"]), **RECOMPUTED},
        "stream": {"data": streamed("sft")},  # also trl#3053
        "mixtral": {"make": model("sft", "mixtral", **EXPERTS), "data": turn_by_turn, "router_aux_loss_coef": 0.5},
    },
    "reward": {
        "accumulated": {"gradient_accumulation_steps": 2},
        "centred": {"center_rewards_coefficient": 0.1, "gradient_checkpointing": True},
        "lora": {"adapters": True, "learning_rate": 0.01, "pad_to_multiple_of": 8},
        "max_length": {"max_length": 30},
        "gpt2": {"make": model("reward", "gpt2")},
        "padded with eos": {"make": padded_with_eos},
        "stream": {"data": streamed("reward"), "layouts": "shared"},
    },
    "kto": {
        "lora": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        "reference": {"adapters": False, "max_length": 20, "desirable_weight": 1.5, "beta": 0.5},
        "apo": {"adapters": False, "loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"},
        "precomputed": {"adapters": False, "precompute_ref_log_probs": True, "pad_to_multiple_of": 8},
        "pairs": {"data": preference_data},
        "stream": {"data": streamed("kto"), "layouts": "shared"},
        # One kind alone in a part has no margin there, and one in the whole
        "parts of apo": {
            "adapters": False,
            "data": lambda n, seed: DATA["kto"](n, seed).sort("label"),
            "loss_type": "apo_zero_unpaired",
            "train_sampling_strategy": "random",
            "ours": {"max_tokens_per_micro_batch": 24},
        },
    },
    "grpo": {
        "grpo": {"loss_type": "grpo", "gradient_accumulation_steps": 2, "temperature": 0.7},
        "bnpo": {"loss_type": "bnpo", "delta": 1.5, "num_iterations": 2, "mask_truncated_completions": True},
        "dr_grpo": {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "steps_per_generation": 2},
        "cispo": {"loss_type": "cispo", "top_entropy_quantile": 0.5, "num_iterations": 2, "pad_to_multiple_of": 8},
        "sapo": {"loss_type": "sapo", "entropy_coef": 0.1, "off_policy_mask_threshold": 0.5, "num_iterations": 2},
        "luspo": {"loss_type": "luspo", "cast_lm_head_to_fp32": True, "gradient_checkpointing": True},
        "vespo": {"loss_type": "vespo", "use_adaptive_entropy": True, "scale_rewards": "batch"},
        "lora": {
            "adapters": True,
            "beta": 0.1,
            "use_bias_correction_kl": True,
            "num_iterations": 2,
            "layouts": LAYOUTS,
        },
        "stream": {"data": streamed("grpo")},
    },
    "rloo": {"lora": {"gradient_accumulation_steps": 2, "num_iterations": 2}},
    "distillation": {
        "beta 0": {"beta": 0.0, "temperature": 0.7, "gradient_accumulation_steps": 2},
        "beta 0.3, lora": {"adapters": True, "beta": 0.3, "pad_to_multiple_of": 8, "gradient_checkpointing": True},
        "beta 1": {"beta": 1.0, "per_device_train_batch_size": 8},
        "gemma3": {"make": teacher("gemma3_text", head_dim=8, seed=1), "beta": 0.5},
        "wider": {"make": teacher("qwen3", hidden_size=48, num_hidden_layers=3, seed=1), "beta": 0.5},
        "stream": {"data": streamed("distillation"), "layouts": "shared"},
        # A row of a short prompt is alone in its micro-batch, and padded to the width of a long one
        **{
            kind: {
                "make": teacher("llama", seed=1, **following_rotary(24, kind)),
                "data": lambda n, seed: Dataset.from_list([{"prompt": "w1 " * length} for length in (1, 25)] * 4),
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 8,
            }
            for kind in ("longrope", "dynamic")
        },
    },
}


@pytest.mark.trl_1
@pytest.mark.drawn(40)
@pytest.mark.parametrize(
    ("task", "name"), [(task, name) for task, cases in CASES.items() for name in cases], ids=lambda x: x
)
def test_training_follows_padded_trl(task, name, model_dir):
    given = {**DEFAULTS[task], **CASES[task][name]}
    data, adapters = given.pop("data"), given.pop("adapters", True)
    make = given.pop("make", lambda folder: arguments(task, adapters))
    compared = compare(task, lambda: make(model_dir), data(16, SEED), **given)
    if name == "turns":
        counts = compared.ours.trainer.total_counts()
        assert counts.computed < counts.real
    if given.get("router_aux_loss_coef"):  # which counts a token that is shared once for each row
        assert compared.padded.log_history[0]["aux_loss"] > 0.1


def test_every_loss_that_trl_knows_is_compared():
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        run("dpo", "padded", loss_type="no_such_loss")
    assert ast.literal_eval(re.search(r"\[.*\]", str(error.value))[0]) == LOSSES


EVALUATED = {
    **dict.fromkeys(("dpo", "kto", "reward", "sft", "dpo, stream", "sft, stream", "distillation"), {}),
    "distillation, whole batches": {"dataloader_drop_last": True, "per_device_eval_batch_size": 2},
    "dpo, precomputed": {"precompute_ref_log_probs": True},
    **dict.fromkeys(("grpo", "rloo"), {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_follows_padded_trl(name, model_dir):
    """Of sets by name, during training and after it; also ms-swift#4839."""
    task = name.split(",")[0]
    generates = task in ("grpo", "rloo", "distillation")

    def data(n):
        rows = DEFAULTS[task]["data"](n, SEED + n)
        return rows.to_iterable_dataset() if "stream" in name else rows

    sets = data(3) if generates else {"one": data(7), "two": data(4)}
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4 if generates else 3,
        **EVALUATED[name],
    }
    results = []
    for layout in ("padded", "shared"):
        made = arguments(task, False)
        if task in ("grpo", "rloo"):  # TRL loads the reference by the model's name
            made["model"] = model_dir
        given = {**made, "eval_dataset": sets, "train_dataset": data(16)}
        results.append(run(task, layout, **given, **options))
        if not generates:
            results[-1].trainer.evaluate({"three": data(5)})
    logged = {name for entry in results[0].log_history for name in entry}
    assert logged >= ({"eval_loss"} if generates else {"eval_one_loss", "eval_two_loss", "eval_three_loss"})
    assert_same(*results, ignored=(*ROUNDED, "accuracy") if task == "reward" else ROUNDED)


@pytest.mark.parametrize("drops_last", [False, True])
def test_a_streamed_evaluation_weighs_its_last_batch_as_padded_trl(drops_last):
    """
    Beside training data that is no stream, TRL dispatches the batches, and knows that the last has fewer rows. Nothing
    drops that of a stream.
    """
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "steps": 1}
    options["dataloader_drop_last"] = drops_last
    options["eval_dataset"] = DATA["sft"](4, SEED).to_iterable_dataset()
    compare("sft", lambda: arguments("sft", False), DATA["sft"](8, SEED), "flat", **options)
