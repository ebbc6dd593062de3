"""Whatever TRL's DPO trainer does, ours does flat, with the same figures and the same weights at the end."""

import json
import math

import pytest
import torch
from datasets import load_from_disk
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import BitsAndBytesConfig, TrainerCallback
from trl import DPOConfig, DPOTrainer
from trl.experimental import bema_for_ref_model
from trl.trainer.dpo_trainer import DataCollatorForPreference

from tests.helpers.offloading import offloading_on_cpu
from tests.helpers.tiny import CHAT_TEMPLATE, lora, make_model, make_tokenizer, preference_data
from tests.runs import LAYOUTS, TOLERANCE, assert_same, compare, run
from trl_paddingfree import PaddingFreeDPOTrainer, PreferenceCollator
from trl_paddingfree.flat import calls
from trl_paddingfree.quickstart.side_by_side import difference

SEED = 40417


@pytest.fixture(scope="module")
def with_lora(tokenizer):
    return lambda: {"model": make_model(), "processing_class": tokenizer, "peft_config": lora()}


# What is trained, and what it is compared with


def full(model_dir, tokenizer):
    return {"model": model_dir}


def given_reference(model_dir, tokenizer):
    return {"model": make_model(), "ref_model": make_model(seed=1), "processing_class": tokenizer}


def adapter(model_dir, tokenizer):
    return {"model": make_model(), "processing_class": tokenizer, "peft_config": lora()}


def pretrained_adapter(model_dir, tokenizer):
    return {"model": get_peft_model(make_model(), lora(lora_alpha=16)), "processing_class": tokenizer}


def embeddings_too(model_dir, tokenizer):
    peft_config = lora(target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"])
    return {"model": make_model(), "processing_class": tokenizer, "peft_config": peft_config}


MODELS = {
    "full fine-tuning": (full, {}),
    "given reference": (given_reference, {}),
    "LoRA with the adapter disabled": (adapter, {}),
    "pretrained adapter with TRL's ref copy": (pretrained_adapter, {}),
    "LoRA with embeddings and head": (embeddings_too, {}),
    "precomputed, LoRA": (adapter, {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3}),
    "precomputed, given reference": (given_reference, {"precompute_ref_log_probs": True}),
    "precomputed, pretrained adapter": (pretrained_adapter, {"precompute_ref_log_probs": True}),
    "synced reference": (
        full,
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6, "steps": 4},
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_reference_trains_the_same(name, model_dir, tokenizer):
    make, options = MODELS[name]
    compare("dpo", lambda: make(model_dir, tokenizer), preference_data(12, SEED), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_that_bema_updates_trains_the_same_with_trls_trainer_for_it(layout, tokenizer):
    class Own(bema_for_ref_model.DPOTrainer, PaddingFreeDPOTrainer):
        pass

    def arguments():
        callback = bema_for_ref_model.BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1)
        return {**given_reference(None, tokenizer), "callbacks": [callback], "train_dataset": preference_data(12, SEED)}

    padded = run("dpo", "padded", trainer_class=bema_for_ref_model.DPOTrainer, **arguments())
    ours = run("dpo", layout, trainer_class=Own, **arguments())
    assert_same(padded, ours)
    assert ours.trainer.method.startswith("padding-free")
    assert len({entry["rewards/chosen"] for entry in padded.log_history if "loss" in entry}) > 1
    for one, other in zip(padded.trainer.ref_model.parameters(), ours.trainer.ref_model.parameters(), strict=True):
        assert difference(one, other) <= TOLERANCE


def test_a_model_that_is_its_own_precomputed_reference_trains_the_same(model_dir):
    # Rewards start at zero up to rounding: which of two zeros is larger is nothing to compare
    options = {"precompute_ref_log_probs": True}
    runs = [
        run("dpo", x, model=model_dir, train_dataset=preference_data(12, SEED), **options) for x in ("padded", *LAYOUTS)
    ]
    for run_ in runs:
        assert run_.log_history[0].pop("rewards/accuracies") <= 1
        assert run_.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    for run_ in runs[1:]:
        assert_same(runs[0], run_)


def test_accuracies_are_those_of_padded_trl(tokenizer):
    """`assert_same` leaves them out, for rounding decides them where a pair is identical: here, none is."""
    pairs = preference_data(24, SEED).filter(lambda pair: pair["chosen"] != pair["rejected"])
    assert len(pairs) >= 12

    def make():
        return {"model": make_model(), "ref_model": make_model(seed=1), "processing_class": tokenizer}

    padded, *ours = (
        [entry.get("rewards/accuracies") for entry in run("dpo", x, **make(), train_dataset=pairs).log_history]
        for x in ("padded", *LAYOUTS)
    )
    assert any(0 < share < 1 for share in padded if share is not None)
    assert ours == [padded] * len(LAYOUTS)


def test_cached_reference_log_probs_are_read_and_train_the_same(model_dir, tmp_path, monkeypatch):
    def make():
        return {"model": model_dir, "peft_config": lora()}

    preference_data(12, SEED).save_to_disk(tmp_path)
    # The function that drops rows by `max_length` holds the whole config, and the name of the cache depends on it
    options = {"precompute_ref_log_probs": True, "max_length": None}
    first = run("dpo", "shared", **make(), train_dataset=load_from_disk(tmp_path), **options)

    def compute(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", compute)
    assert_same(first, run("dpo", "shared", **make(), train_dataset=load_from_disk(tmp_path), **options), tolerance=0)
    # Padded TRL finds the same cache: our checks leave the data set as it is
    assert_same(run("dpo", "padded", **make(), train_dataset=load_from_disk(tmp_path), **options), first)


# Options of the trainer

OPTIONS = {
    "plain text": {"conversational": False},
    "gradient checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant gradient checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "gradient accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "keep_start": {"max_length": 14, "truncation_mode": "keep_start"},
    "keep_end": {"max_length": 14, "truncation_mode": "keep_end"},
    "pad_to_multiple_of": {"pad_to_multiple_of": 16},
    "batches of one pair": {"per_device_train_batch_size": 1, "steps": 5},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains_the_same(name, with_lora):
    options = dict(OPTIONS[name])
    dataset = preference_data(12, SEED, conversational=options.pop("conversational", True))
    compare("dpo", with_lora, dataset, **options)


def test_streaming_data_trains_and_evaluates_the_same(with_lora):
    def make():
        return {**with_lora(), "eval_dataset": preference_data(7, SEED + 1).to_iterable_dataset()}

    train_dataset = preference_data(16, SEED).to_iterable_dataset()
    padded = compare(
        "dpo", make, train_dataset, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4
    ).padded
    assert any("eval_loss" in entry for entry in padded.log_history)


def test_tools_and_template_options_reach_the_model(tokenizer):
    tool = {"type": "function", "function": {"name": "w3", "description": "w4 w5", "parameters": {}}}
    template = (
        "{% for tool in tools or [] %}system {{ tool['function']['name'] }} "
        "{{ tool['function']['description'] }} {% endfor %}{% if loud %}w59 w59 {% endif %}" + CHAT_TEMPLATE
    )
    with_tools = make_tokenizer()
    with_tools.chat_template = template
    plain = preference_data(12, SEED)
    dataset = plain.map(lambda _: {"tools": json.dumps([tool]), "chat_template_kwargs": {"loud": True}})

    def make():
        return {"model": make_model(), "processing_class": with_tools, "peft_config": lora()}

    padded = compare("dpo", make, dataset).padded
    prompts = padded.trainer.train_dataset["prompt_ids"]
    preamble = with_tools("system w3 w4 w5 w59 w59")["input_ids"]
    assert all(prompt[: len(preamble)] == preamble for prompt in prompts)


def test_dropout_is_left_on_if_asked_and_evaluation_is_without(tokenizer):
    def make():
        return {
            "model": make_model(attention_dropout=0.3),
            "processing_class": tokenizer,
            "peft_config": lora(lora_dropout=0.3),
            "eval_dataset": preference_data(6, SEED + 1),
        }

    # The random numbers of a padded batch fall on other tokens: training is the same in distribution only
    options = {"eval_strategy": "steps", "eval_on_start": True, "steps": 1, "disable_dropout": False}
    padded, *ours = (
        run("dpo", layout, **make(), train_dataset=preference_data(8, SEED), **options)
        for layout in ("padded", *LAYOUTS)
    )
    without = run(
        "dpo", "flat", **with_attention_dropout_off(make)(), train_dataset=preference_data(8, SEED), **options
    )
    for run_ in ours:
        for name, value in padded.log_history[0].items():
            if name.startswith("eval_") and "per_second" not in name and "runtime" not in name:
                assert difference(value, run_.log_history[0][name]) <= TOLERANCE, name
        assert abs(run_.log_history[1]["logps/chosen"] - without.log_history[1]["logps/chosen"]) > 0.1


def with_attention_dropout_off(make):
    def changed():
        arguments = make()
        arguments["model"] = make_model()
        arguments["peft_config"].lora_dropout = 0.0
        return arguments

    return changed


def test_one_batch_of_eight_equals_eight_batches_of_one(with_lora):
    together = run(
        "dpo", "shared", **with_lora(), train_dataset=preference_data(16, SEED), per_device_train_batch_size=8, steps=2
    )
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    one_by_one = run("dpo", "shared", **with_lora(), train_dataset=preference_data(16, SEED), steps=2, **options)
    # Figures per token are means of means: they depend on the batches, in TRL too
    for run_ in (together, one_by_one):
        for entry in run_.log_history:
            for name in ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"):
                entry.pop(name, None)
    assert_same(together, one_by_one)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_router_loss_counts_a_shared_token_once_per_row(model_type, tokenizer):
    sizes = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

    def make():
        models = {name: make_model(model_type, seed=s, **sizes) for name, s in (("model", 0), ("ref_model", 1))}
        return {**models, "processing_class": tokenizer}

    padded = compare("dpo", make, preference_data(12, SEED), router_aux_loss_coef=0.5).padded
    assert all(entry["aux_loss"] > 0.1 for entry in padded.log_history if "aux_loss" in entry)
    assert "aux_loss" in padded.log_history[0]


# Low precision


def error(run_, exact):
    """Root mean square difference of what two runs logged per step, relative to `exact`."""
    names = ("loss", "grad_norm", "logps/chosen", "logps/rejected", "entropy", "logits/chosen")
    pairs = [
        (entry[name], expected[name])
        for entry, expected in zip(run_.log_history, exact.log_history, strict=True)
        for name in names
        if name in expected
    ]
    return math.sqrt(sum(((a - b) / b) ** 2 for a, b in pairs) / len(pairs))


# Both errors are sums over the same rounding, taken in another order: they agree within a small factor
PRECISION_FACTOR = 2


def test_bf16_is_as_near_to_float32_as_padded_bf16(with_lora):
    dataset = preference_data(16, SEED)
    exact = run("dpo", "padded", **with_lora(), train_dataset=dataset)
    padded = error(run("dpo", "padded", **with_lora(), train_dataset=dataset, bf16=True), exact)
    assert padded > 1e-4  # bf16 does round
    for layout in LAYOUTS:
        assert (
            error(run("dpo", layout, **with_lora(), train_dataset=dataset, bf16=True), exact)
            < PRECISION_FACTOR * padded
        )


def test_bf16_weights_are_as_near_to_float32_as_padded_ones(tokenizer):
    def make_as(dtype):
        def make():
            model = make_model().to(torch.bfloat16).to(dtype)
            return {"model": model, "processing_class": tokenizer, "peft_config": lora()}

        return make

    dataset = preference_data(16, SEED)
    exact = run("dpo", "padded", **make_as(torch.float32)(), train_dataset=dataset)
    padded = error(run("dpo", "padded", **make_as(torch.bfloat16)(), train_dataset=dataset), exact)
    assert padded > 1e-4
    for layout in LAYOUTS:
        assert (
            error(run("dpo", layout, **make_as(torch.bfloat16)(), train_dataset=dataset), exact)
            < PRECISION_FACTOR * padded
        )


# TRL keeps QLoRA's adapter, its gradients and its optimizer in bfloat16, in both runs: an entry that is rounded the
# other way differs by one unit of rounding, and a figure is a mean over many.
QLORA_TOLERANCE = torch.finfo(torch.bfloat16).eps / 2


def test_qlora_trains_the_same(model_dir):
    pytest.importorskip("bitsandbytes")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )

    def make():
        return {"model": model_dir, "quantization_config": quantization, "peft_config": lora()}

    padded = run("dpo", "padded", **make(), train_dataset=preference_data(16, SEED))
    for layout in LAYOUTS:
        assert error(run("dpo", layout, **make(), train_dataset=preference_data(16, SEED)), padded) < QLORA_TOLERANCE


# Evaluation, checkpoints


def log_prob_of_words(prediction):
    """Mean log-probability of the tokens of the rows, from the logits. 0 is the padding token."""
    logits, tokens = torch.tensor(prediction.predictions)[:, :-1], torch.tensor(prediction.label_ids)[:, 1:]
    real = tokens > 0
    return {"words": logits.log_softmax(-1)[real].gather(-1, tokens[real][:, None]).mean().item()}


def test_evaluation_during_and_after_training_is_the_same(with_lora):
    def make():
        sets = {"one": preference_data(7, SEED + 1), "two": preference_data(4, SEED + 2)}
        return {**with_lora(), "eval_dataset": sets, "compute_metrics": log_prob_of_words}

    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
    runs = [
        run("dpo", layout, **make(), train_dataset=preference_data(12, SEED), **options)
        for layout in ("padded", *LAYOUTS)
    ]
    for run_ in runs:
        run_.trainer.evaluate(preference_data(5, SEED + 3))
        run_.trainer.evaluate({"three": preference_data(5, SEED + 4)})
    logged = {name for entry in runs[0].log_history for name in entry}
    assert {"eval_one_words", "eval_two_loss", "eval_words", "eval_three_words"} <= logged
    assert all(run_.log_history[-1]["step"] == 3 for run_ in runs)
    for run_ in runs[1:]:
        assert_same(runs[0], run_)


def test_evaluation_with_precomputed_references_is_the_same(with_lora):
    def make():
        return {**with_lora(), "eval_dataset": preference_data(7, SEED + 1)}

    options = {"eval_strategy": "steps", "eval_steps": 2, "precompute_ref_log_probs": True}
    runs = [
        run("dpo", layout, **make(), train_dataset=preference_data(12, SEED), **options)
        for layout in ("padded", *LAYOUTS)
    ]
    for run_ in runs:
        run_.trainer.evaluate(preference_data(5, SEED + 3))
    for run_ in runs[1:]:
        assert_same(runs[0], run_)


def test_a_resumed_run_ends_like_an_uninterrupted_one(with_lora, tmp_path):
    options = {"steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = run("dpo", "shared", **with_lora(), train_dataset=preference_data(16, SEED), **options)
    arguments = with_lora()
    trainer = PaddingFreeDPOTrainer(args=whole.trainer.args, train_dataset=preference_data(16, SEED), **arguments)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4, 4]
    for expected, entry in zip(whole.log_history[:4], trainer.state.log_history[:4], strict=True):
        # TRL counts tokens anew; the clock and the process's memory are the machine's
        for name in expected.keys() - {"num_tokens", "flat/tokens_per_second", "flat/peak_memory_gib"}:
            assert entry[name] == expected[name], name
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in whole.weights.items())


# Speed options


@pytest.mark.slow
@pytest.mark.parametrize("with_reference", [False, True], ids=["lora-precomputed", "full-with-reference"])
def test_compiled_training_is_the_same(tokenizer, with_reference):
    def make():
        models = {"model": make_model(num_hidden_layers=1), "processing_class": tokenizer}
        if with_reference:  # which TRL compiles before training
            return {**models, "ref_model": make_model(num_hidden_layers=1)}
        return {**models, "peft_config": lora(target_modules=["q_proj"])}

    # The second step has other shapes than the first: everything is compiled once more, for all shapes
    options = {"steps": 2 if with_reference else 1, "precompute_ref_log_probs": not with_reference}
    padded = run("dpo", "padded", **make(), train_dataset=preference_data(8, SEED), **options)
    # Tracing is what can go wrong, and compiling C++ takes a minute: once is enough
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager" if with_reference else "inductor"}
    assert_same(padded, run("dpo", "shared", **make(), train_dataset=preference_data(8, SEED), **compiled, **options))


def test_activations_that_are_moved_away_and_back_train_the_same(with_lora):
    options = {"train_dataset": preference_data(8, SEED), "steps": 2}
    plain = run("dpo", "padded", **with_lora(), **options)
    for layout in LAYOUTS:
        with offloading_on_cpu("dpo") as moved:
            assert_same(plain, run("dpo", layout, **with_lora(), **options, activation_offloading=True))
        assert sum(moved)


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["activation_offloading", "use_liger_kernel"])
def test_options_that_need_a_gpu_train_the_same(option, with_lora):
    if option == "use_liger_kernel":
        pytest.importorskip("liger_kernel")
    # float32 on a GPU: matrix products of other shapes take other kernels
    compare("dpo", with_lora, preference_data(12, SEED), tolerance=1e-3, use_cpu=False, **{option: True})


# What padding-free promises


def test_a_new_adapter_starts_at_ln_2(model_dir, tokenizer):
    data = preference_data(8, SEED)
    for layout in LAYOUTS:
        first = run("dpo", layout, model=model_dir, peft_config=LoraConfig(), train_dataset=data, steps=1)
        # Policy and reference run the same kernels on the same numbers: what is left is writing ln 2 in float32
        assert first.losses[0] == pytest.approx(math.log(2), abs=1e-7)


def trained_once(layout, make, dataset, **options):
    """A trainer that has trained for one step at learning rate 0, which is where TRL sets the last things up."""
    return run("dpo", layout, **make(), train_dataset=dataset, steps=1, learning_rate=0.0, **options).trainer


def log_probs(trainer, pairs):
    batch = trainer.data_collator(pairs)
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(**batch, labels=labels, fused_lm_head=True).log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_does_not_move_by_one_bit_when_the_pair_beside_it_changes(layout, dtype, tokenizer):
    def make():
        return {"model": make_model(dtype=dtype), "processing_class": tokenizer, "peft_config": lora()}

    trainer = trained_once(layout, make, preference_data(12, SEED))
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    a, b = ({name: row[name] for name in columns} for row in trainer.train_dataset.select([0, 5]))
    # Every word becomes another one, and no two the same: the rows share what they shared before
    first = tokenizer.convert_tokens_to_ids("w0")
    other = {
        name: [first + (token - first + 31) % 60 if token >= first else token for token in ids]
        for name, ids in b.items()
    }
    for order in (1, -1):  # beside it in second place, and in first
        layouts = [trainer.data_collator([a, beside][::order])["flat_batch"].layout.segments for beside in (b, other)]
        assert layouts[0] == layouts[1]
        before, after = (log_probs(trainer, [a, beside][::order]) for beside in (b, other))
        mine = [0, 2] if order == 1 else [1, 3]
        assert torch.equal(before[mine], after[mine])
        assert not torch.equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_permuting_the_pairs_changes_nothing_but_rounding(layout, with_lora):
    trainer = trained_once(layout, with_lora, preference_data(12, SEED))
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{name: row[name] for name in columns} for row in trainer.train_dataset]
    results = []
    for order in (range(12), [7, 2, 11, 0, 9, 4, 1, 10, 3, 8, 5, 6]):
        trainer.model.train()
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, trainer.data_collator([pairs[i] for i in order]))
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        results.append((loss.detach(), gradients))
    (loss, gradients), (permuted_loss, permuted_gradients) = results
    # A few units of float32 rounding of the largest entry
    torch.testing.assert_close(permuted_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(permuted_gradients, gradients, rtol=0, atol=3e-6 * gradients.abs().max().item())


class TokensSeen(TrainerCallback):
    """Counts what reaches the embedding between the start and the end of training."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.tokens = []
        self.hook = model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: self.tokens.append(inputs[0].flatten())
        )

    def on_train_end(self, *args, **kwargs):
        self.hook.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_embedding_sees_exactly_the_tokens_that_are_counted(layout, with_lora, tokenizer):
    seen = TokensSeen()
    result = run("dpo", layout, **with_lora(), callbacks=[seen], train_dataset=preference_data(12, SEED))
    tokens = torch.cat(seen.tokens)
    counts = result.trainer.flat.counts.logged
    assert len(tokens) == 2 * counts.computed  # once for the policy and once for the reference
    assert not (tokens == tokenizer.pad_token_id).any()
    rows = [
        row["prompt_ids"] + row[name]
        for row in result.trainer.train_dataset  # the run is one epoch
        for name in ("chosen_ids", "rejected_ids")
    ]
    assert counts.real == sum(map(len, rows))
    assert counts.computed == counts.real if layout == "flat" else counts.computed < 0.8 * counts.real


def step_flops(trainer, pairs):
    """FLOPs of one training step."""
    trainer.model.train()
    with FlopCounterMode(display=False) as counter:
        trainer.compute_loss(trainer.model, trainer.data_collator(pairs)).backward()
    return counter.get_total_flops()


@pytest.mark.slow
def test_one_flat_step_costs_what_its_sequences_cost_one_by_one(tokenizer, monkeypatch):
    monkeypatch.setattr(calls, "PAIRS_OF_A_CALL", 0)  # short segments are padded, where that is faster than calls

    def make():
        models = {"model": make_model(num_hidden_layers=3), "ref_model": make_model()}
        for model in models.values():  # the counter knows nothing of SDPA on a CPU
            model.set_attn_implementation("eager")
        return {**models, "processing_class": tokenizer}

    trainers = {layout: trained_once(layout, make, preference_data(12, SEED)) for layout in ("padded", *LAYOUTS)}
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{name: row[name] for name in columns} for row in trainers["padded"].train_dataset]
    flops = {layout: step_flops(trainer, pairs) for layout, trainer in trainers.items()}

    # Plain transformers, without padding, without our code: every sequence through policy and reference
    model, ref_model = trainers["padded"].model, trainers["padded"].ref_model
    with FlopCounterMode(display=False) as counter:
        for pair in pairs:
            for name in ("chosen_ids", "rejected_ids"):
                input_ids = torch.tensor([pair["prompt_ids"] + pair[name]])
                scored = len(pair[name])
                with torch.no_grad():
                    ref_model.lm_head(ref_model.model(input_ids).last_hidden_state[:, -scored - 1 : -1])
                model.lm_head(model.model(input_ids).last_hidden_state[:, -scored - 1 : -1]).sum().backward()
    one_by_one = counter.get_total_flops()
    # TRL's fused head multiplies into a buffer of its own, which the counter does not see
    assert 0.97 * one_by_one < flops["flat"] <= 1.01 * one_by_one
    assert flops["shared"] < 0.85 * one_by_one
    assert flops["padded"] > 1.3 * one_by_one


# The switch


def test_without_padding_free_it_is_trl_bit_for_bit(with_lora):
    def make():
        return {**with_lora(), "eval_dataset": preference_data(5, SEED + 1)}

    options = {"padding_free": False, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 5e-3}
    results = []
    for trainer_class in (DPOTrainer, PaddingFreeDPOTrainer):
        arguments = make()
        model = arguments.pop("model")
        common = {"model": model, "train_dataset": preference_data(12, SEED), **arguments}
        results.append(run("dpo", "padded", trainer_class=trainer_class, **common, **options))
    trl, ours = results
    timed = ("runtime", "per_second")
    plain = [[{n: v for n, v in e.items() if not any(t in n for t in timed)} for e in r.log_history] for r in results]
    assert plain[0] == plain[1]
    assert all(torch.equal(ours.weights[name], value) for name, value in trl.weights.items())
    assert type(ours.trainer.data_collator) is DataCollatorForPreference
    assert ours.trainer.model.get_base_model().config._attn_implementation == "sdpa"


def test_trls_own_config_switches_padding_free_on(with_lora, model_dir):
    arguments = with_lora()
    model = arguments.pop("model")
    common = {"model": model, "train_dataset": preference_data(12, SEED), **arguments}
    ours = run(
        "dpo", "ours", config_class=DPOConfig, padding_free=True, learning_rate=5e-3, adam_epsilon=1e-2, **common
    )
    assert ours.trainer.padding_free
    assert ours.trainer.args.padding_free
    assert_same(run("dpo", "shared", **with_lora(), train_dataset=preference_data(12, SEED)), ours, tolerance=0)


@pytest.mark.parametrize("pad_to_multiple_of", [None, 8])
@pytest.mark.parametrize(("max_length", "truncation_mode"), [(None, "keep_start"), (9, "keep_start"), (9, "keep_end")])
@pytest.mark.parametrize("padding_free", [False, True])
def test_the_collator_gives_trls_tensors(padding_free, max_length, truncation_mode, pad_to_multiple_of):
    ids = [([1, 2, 3], [4, 5], [6]), ([], [9], [10, 11]), (list(range(12, 24)), [24], [])]
    examples = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} for prompt, chosen, rejected in ids
    ]
    with_reference = [
        {**example, "ref_chosen_logps": -1.5 * i, "ref_rejected_logps": -2.0 - i} for i, example in enumerate(examples)
    ]
    arguments = (50, max_length, truncation_mode, pad_to_multiple_of)
    for batch in (examples, with_reference):
        expected = DataCollatorForPreference(*arguments)(batch)
        ours = PreferenceCollator(*arguments, padding_free=padding_free)(batch)
        flat_batch = ours.pop("flat_batch", None)
        assert (flat_batch is not None) == padding_free
        assert ours.keys() == expected.keys()
        assert next(iter(ours)) == "input_ids"  # accelerate looks at the first value to learn the batch size
        for name, tensor in expected.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)
