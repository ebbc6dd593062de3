"""The bytes that a memory budget predicts are those that training keeps."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.helpers.architectures import is_older, tiny_model
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.memory import BOLD, CAUTIOUS, KINDS, LAYERS, budgeted, byte_per_token, layered, ready, with_images
from tests.helpers.reference_flash import varlen_on
from tests.helpers.reference_state import reference_state_kernels
from tests.helpers.tiny import (
    ATTENTIONS,
    DATA,
    DTYPES,
    SEED,
    conversations,
    following_rotary,
    lora,
    make_model,
    preference_data,
)
from tests.helpers.vision import vision_messages, vision_pairs
from tests.runs import run
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.features import FEATURES, TOKENS
from trl_paddingfree.budgets.kept_bytes import count_kept_bytes
from trl_paddingfree.budgets.needs import HeadBytes, fixed_bytes, optimizer_bytes, tensor_bytes
from trl_paddingfree.budgets.planner import CORRECTED, MemoryPlanner
from trl_paddingfree.budgets.saved_bytes import SavedBytes
from trl_paddingfree.core.device import GIB
from trl_paddingfree.core.flat.schedule import Schedule
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route
from trl_paddingfree.recomputable import recompute_first

VARLEN = {"prefix_sharing": True, "flat_attention": "varlen", "model_init_kwargs": {"dtype": "bfloat16"}}


def counted(trainer, batch, number):
    """Bytes that a training forward pass of `batch` saves if the first `number` layers recompute."""
    layers = trainer.planner.layers
    counter = SavedBytes(trainer.flat_base(trainer.model), layers)
    batch = {name: value for name, value in batch.items() if name != "rows"}
    trainer.planner.own_schedule = lambda _: Schedule(recompute=number)
    trainer.model.train()
    with counter.counting():
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    assert loss.requires_grad
    kept = sum(counter.total(i) for i in (-1, *range(number, len(layers))))
    # A checkpoint keeps the input of its layer. Before transformers 5.23, hooks of the layer run within the checkpoint:
    # there the input is counted outside of all layers
    return kept if is_older("5.23") else kept + sum(counter.inputs[:number])


def assert_predicted(trainer, cautious=CAUTIOUS):
    memory = ready(trainer).planner
    for batch in trainer.get_train_dataloader():
        saved = memory.needs.saved(memory.features(batch["flat_batch"]))
        for number in (0, 1, len(trainer.planner.layers)):
            assert 1 - BOLD <= saved[number] / counted(trainer, batch, number) <= 1 + cautious, number


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("task", "options"),
    [("dpo", {}), ("dpo", {"flat_attention": "mask"}), ("sft", {"prefix_sharing": True}), ("sft", VARLEN), ("sft", {})],
    ids=["dpo", "dpo-mask", "sft-shared", "sft-varlen", "sft"],
)
def test_predicted_bytes_are_counted_ones(folder, task, options):
    data = preference_data(16, SEED) if task == "dpo" else conversations(16, SEED)
    kwargs = {"peft_config": lora()} if task == "dpo" else {}
    with varlen_on():
        trainer = budgeted(task, folder, data, **options, **kwargs)
        assert_predicted(trainer)
    assert bool(trainer.planner.needs.per_feature.copied) == (options == VARLEN)


@pytest.mark.parametrize("task", ["reward", "kto"])
@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_predicted_bytes_of_heads(task, layout):
    options = {"per_device_train_batch_size": 8, "memory_budget": 8}
    assert_predicted(run(task, layout, **layered(task), train_dataset=DATA[task](24, SEED), **options).trainer)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("task", "lora"), [("dpo", True), ("sft", False)], ids=["dpo", "sft"])
def test_predicted_bytes_of_towers(kind, task, lora):
    data = vision_pairs(16, SEED) if task == "dpo" else vision_messages(16, SEED)
    assert_predicted(with_images(kind, task, data, lora=lora, per_device_train_batch_size=8))


@pytest.mark.drawn(1)
@ATTENTIONS
def test_predicted_bytes_of_experts(attention, tokenizer):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS, **sizes)
    model.set_attn_implementation(attention)
    options = {"processing_class": tokenizer, "peft_config": lora()}
    # Of few tokens, not every expert gets some: batches of more
    assert_predicted(budgeted("dpo", model, preference_data(32, SEED), per_device_train_batch_size=16, **options))


def test_predicted_bytes_of_layers_with_a_state(tokenizer):
    model = tiny_model("qwen3_next")
    with reference_state_kernels(model):
        data = conversations(32, SEED)
        data = data.map(lambda row: {"messages": row["messages"] * 8})
        # Those kernels work in chunks of 64 tokens, and keep several times as much of rows that are shorter than these
        assert_predicted(budgeted("sft", model, data, processing_class=tokenizer), cautious=3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "falcon_h1", "jamba", "lfm2"])
def test_predicted_bytes_of_states_along_the_tree(model_type, tokenizer):
    """Pieces of many lengths, shorter and longer than the chunks of their recurrence."""
    longer = {"prompt": 6, "chosen": 4, "rejected": 3}
    data = preference_data(8, SEED).map(lambda row: {name: row[name] * times for name, times in longer.items()})
    # A state of a head is more than its tokens keep, as in real models
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if model_type == "qwen3_5_text" else {}
    models = [tiny_model(model_type, seed=seed, **sizes) for seed in (1, 2)]
    trainer = budgeted("dpo", models[0], data, processing_class=tokenizer, ref_model=models[1], max_length=512)
    assert trainer.runtime.route.states == "tree"
    assert_predicted(trainer)


def test_predicted_bytes_of_4_bit_weights(folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    made_of = {"peft_config": lora(), "processing_class": AutoTokenizer.from_pretrained(folder)}
    assert_predicted(budgeted("dpo", model, preference_data(16, SEED), **made_of))


@pytest.mark.drawn(1)
@DTYPES
def test_the_lm_head_works_with_the_bytes_that_are_predicted(tokenizer, dtype):
    model, data = make_model(dtype=dtype, vocab_size=32768), conversations(8, SEED)
    trainer = budgeted("sft", model, data, processing_class=tokenizer)
    ids = torch.randint(32768, (4, 128))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs.sum().backward()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    # What the layers keep of so few tokens is next to nothing
    assert trainer.planner.needs.head.tile[0] * ids.numel() == pytest.approx(max(np.cumsum(changes)), rel=0.1)


@pytest.mark.parametrize("optimizer", [None, (torch.optim.SGD, {"lr": 0.1})])
def test_fixed_bytes_are_those_of_the_tensors(folder, optimizer):
    given = {"memory_budget": 8, "steps": 1, "optimizer_cls_and_kwargs": optimizer}
    trainer = run("sft", "ours", model=folder, **given).trainer
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    state = [x for s in trainer.optimizer.state.values() for x in s.values() if x.numel() > 1]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    buffers = tensor_bytes(trainer.model.buffers())
    # Beside the moments Adam has a number of steps per parameter
    assert trainer.planner.needs.fixed == pytest.approx(2 * gradients + buffers + tensor_bytes(state), rel=0.01)


class PagesWhatIsLarge(torch.optim.Adam):
    """As bitsandbytes, whose state of large tensors gives way to everything else."""

    def step(self, closure=None):
        super().step(closure)
        for parameter, state in self.state.items():
            for x in state.values():
                x.is_paged = parameter.numel() >= 100_000


def test_state_that_is_paged_counts_for_small_tensors_only():
    small, large = torch.zeros(100, 100), torch.zeros(400, 400)
    options = {"lr": 1e-3}
    assert optimizer_bytes(PagesWhatIsLarge, options, [small]) == pytest.approx(2 * tensor_bytes([small]), rel=0.01)
    both = optimizer_bytes(PagesWhatIsLarge, options, [small, large])
    assert both == optimizer_bytes(PagesWhatIsLarge, options, [small])


def test_what_holds_memory_beside_the_models_counts():
    model, optimizer = make_model(), (torch.optim.SGD, {"lr": 1e-3})
    alone = fixed_bytes([model], optimizer)
    loaded = tensor_bytes([*model.parameters(), *model.buffers()])
    assert fixed_bytes([model], optimizer, held=loaded) == alone
    assert fixed_bytes([model], optimizer, held=loaded + GIB) == alone + GIB


def test_what_comes_to_hold_memory_in_training_corrects_no_prediction_and_is_saved(tmp_path):
    flat = FlatModel.install(make_model(), Route("segment", "sdpa", True))
    batch = FlatBatch.from_rows([[5, 6]], [[5, 6]])

    def made(held):
        peak = SimpleNamespace(can_reset=True, held=held, peak=held + 100)
        needs = byte_per_token(1, recomputed=1, fixed=1000)
        return MemoryPlanner(flat, Accelerator(cpu=True), peak, option=8, budget=8 * GIB, needs=needs)

    memory = made(held=1500)
    for _ in range(CORRECTED):
        memory.current, memory.held = replace(batch, schedule=Schedule(peak=memory.needs.fixed + 100)), 1500
        memory.finish(has_stepped=True)
        assert (memory.needs.fixed, memory.needs.correction) == (1500, 1)
    memory.save(tmp_path)
    resumed = made(held=0)
    resumed.restore(tmp_path)
    assert (resumed.needs.fixed, resumed.needs.correction) == (1500, 1)


def test_padding_of_short_segments_raises_what_layers_need_and_not_the_head():
    """The head pads nothing: it once made the least budget of short jobs twice what they take."""
    needs = replace(byte_per_token(2, recomputed=1), head=HeadBytes(constant=1000))
    features = np.eye(len(FEATURES), dtype=np.int64)[TOKENS] * 10
    whole = features[None], (np.zeros(1, np.int64), np.zeros(1, np.int64)), features
    padded = replace(needs, correction=2.0, padding=2.0)
    assert (padded.saved(features) == 2 * needs.saved(features)).all()
    assert (needs.peaks(features)[0], padded.peaks(features)[0]) == (1020, 1040)
    assert (needs.peaks_of_slices(*whole)[0], padded.peaks_of_slices(*whole)[0]) == (1020, 1040)
    more, less = (replace(padded, correction=x) for x in (4.0, 0.5))  # as measured
    assert (more.peaks(features)[0], less.peaks(features)[0]) == (2 * 1040, 1010)


def test_counting_leaves_the_model_as_it_was(folder):
    trainer = budgeted("dpo", folder, preference_data(8, SEED), peft_config=lora(lora_dropout=0.5))
    base, weights = trainer.flat_base(trainer.model), [p.clone() for p in trainer.model.parameters()]
    base.eval()
    recompute_first(trainer.planner.layers, 1)
    before = torch.get_rng_state()
    once, again = (count_kept_bytes(base, trainer.runtime.route) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(vars(once).values(), vars(again).values(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module.training for module in base.modules())
    assert [layer.gradient_checkpointing for layer in trainer.planner.layers] == [True, False, False]
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_counting_bytes_leaves_frequencies_as_they_were(model_type):
    """Those of rows longer than all of training would stay."""
    options = following_rotary(24, "dynamic")
    if model_type != "llama":  # has frequencies of each kind of layer, and notes their lengths once there are any
        kinds = ["full_attention", "sliding_attention"]
        options |= {"rope_parameters": dict.fromkeys(kinds, options["rope_parameters"]), "layer_types": kinds}
    model = make_model(model_type, **options)
    rotary = model.model.rotary_emb
    before = {**vars(rotary)}
    count_kept_bytes(model, flat_model(model).route)
    assert vars(rotary) == before
