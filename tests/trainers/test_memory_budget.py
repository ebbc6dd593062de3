"""Training under a memory budget: predicted bytes are counted ones, and no decision changes a figure."""

import gc
import os
import re
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

from tests.helpers.architectures import tiny_model
from tests.helpers.dpo_runs import lora
from tests.helpers.equivalence import Trajectory, assert_same, run
from tests.helpers.memory import assert_predicted, between, failing, ready, step
from tests.helpers.reference_state import reference_state_kernels
from tests.helpers.tiny import conversations, make_model, preference_data
from tests.trainers.test_micro_batches import same_training
from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer, PaddingFreeSFTConfig, PaddingFreeSFTTrainer
from trl_paddingfree.memory.budget import Budget
from trl_paddingfree.memory.device import GIB
from trl_paddingfree.memory.kept_bytes import count_kept_bytes
from trl_paddingfree.memory.needs import MemoryNeeds, fixed_bytes, optimizer_bytes, tensor_bytes
from trl_paddingfree.memory.plan import CORRECTED, MemoryBudget, Pass, adds_up_shards
from trl_paddingfree.model.architecture import recompute_first
from trl_paddingfree.trainers.steps import Attempt

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
LAYERS = 3
DPO, SFT = (PaddingFreeDPOTrainer, PaddingFreeDPOConfig), (PaddingFreeSFTTrainer, PaddingFreeSFTConfig)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=LAYERS).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def made(task, model, train_dataset, **options):
    """A trainer under a budget that holds everything."""
    trainer, config = task
    defaults = {"memory_budget": 8, "per_device_train_batch_size": 8, "bf16": False, "use_cpu": True, "max_steps": 2}
    defaults |= {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "dataloader_pin_memory": False}
    defaults |= {"output_dir": tempfile.mkdtemp(prefix="trl_paddingfree_test_"), "learning_rate": 1e-3}
    kwargs = options.pop("trainer_kwargs", {})
    if "steps" in options:
        options["max_steps"] = options.pop("steps")
    if "memory_budget" in options and options["memory_budget"] is None:
        defaults["gradient_checkpointing"] = False
    args = config(**{**defaults, "adam_epsilon": 1e-5, **options})
    return trainer(model=model, args=args, train_dataset=train_dataset, **kwargs)


def same(a, b):
    """Whether two runs logged the same figures and ended with the same weights, to the last bit."""
    figures = ("loss", "grad_norm", "rewards/margins", "entropy", "num_tokens", "mean_token_accuracy")
    for one, other in zip(a.log_history, b.log_history, strict=True):
        assert {name: one[name] for name in figures if name in one} == {n: other[n] for n in figures if n in other}
    for name, weight in a.weights.items():
        assert torch.equal(weight, b.weights[name]), name


# --- The prediction --------------------------------------------------------------------------------------------------


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("task", "options"),
    [(DPO, {}), (DPO, {"flat_attention": "mask"}), (SFT, {"prefix_sharing": True}), (SFT, {})],
    ids=["dpo", "dpo-mask", "sft-shared", "sft"],
)
def test_predicted_bytes_are_counted_ones(folder, task, options):
    data = preference_data(16, SEED) if task is DPO else conversations(16, SEED)
    kwargs = {"peft_config": lora()} if task is DPO else {}
    assert_predicted(made(task, folder, data, **options, trainer_kwargs=kwargs))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_predicted_bytes_of_experts(attention, tokenizer):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = make_model("qwen3_moe", num_hidden_layers=LAYERS, **sizes)
    model.set_attn_implementation(attention)
    kwargs = {"processing_class": tokenizer, "peft_config": lora()}
    # Of few tokens, not every expert gets some: batches of more
    options = {"trainer_kwargs": kwargs, "per_device_train_batch_size": 16}
    assert_predicted(made(DPO, model, preference_data(32, SEED), **options))


def test_predicted_bytes_of_layers_with_a_state(tokenizer):
    model = tiny_model("qwen3_next")
    with reference_state_kernels(model):
        data = conversations(32, SEED)
        # Those kernels work in chunks of 64 tokens, which short rows do not fill: one row per batch that does
        data = data.map(lambda row: {"messages": row["messages"] * 8})
        assert_predicted(made(SFT, model, data, trainer_kwargs={"processing_class": tokenizer}))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "falcon_h1", "jamba", "lfm2"])
def test_predicted_bytes_of_states_along_the_tree(model_type, tokenizer):
    """Pieces of many lengths, shorter and longer than the chunks of their recurrence."""
    longer = {"prompt": 6, "chosen": 4, "rejected": 3}
    data = preference_data(8, SEED).map(lambda row: {name: row[name] * times for name, times in longer.items()})
    # A state of a head is more than its tokens keep, as in real models
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if model_type == "qwen3_5_text" else {}
    models = [tiny_model(model_type, seed=seed, **sizes) for seed in (1, 2)]
    kwargs = {"processing_class": tokenizer, "ref_model": models[1]}
    trainer = made(DPO, models[0], data, trainer_kwargs=kwargs, max_length=512)
    assert trainer.flat.route.states == "tree"
    assert_predicted(trainer)


def test_predicted_bytes_of_4_bit_weights(folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    made_of = {"peft_config": lora(), "processing_class": AutoTokenizer.from_pretrained(folder)}
    assert_predicted(made(DPO, model, preference_data(16, SEED), trainer_kwargs=made_of))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_lm_head_works_with_the_bytes_that_are_predicted(tokenizer, dtype):
    kwargs = {"processing_class": tokenizer}
    trainer = made(SFT, make_model(dtype=dtype, vocab_size=32768), conversations(8, SEED), trainer_kwargs=kwargs)
    ids = torch.randint(32768, (4, 128))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False).log_probs.sum().backward()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    # What the layers keep of so few tokens is next to nothing
    assert trainer.flat.memory.needs.tile[0] * ids.numel() == pytest.approx(max(np.cumsum(changes)), rel=0.1)


def test_counting_leaves_the_model_as_it_was(folder):
    trainer = made(DPO, folder, preference_data(8, SEED), trainer_kwargs={"peft_config": lora(lora_dropout=0.5)})
    base, weights = trainer.flat_base(trainer.model), [p.clone() for p in trainer.model.parameters()]
    base.eval()
    recompute_first(trainer.flat.memory.layers, 1)
    before = torch.get_rng_state()
    once, again = (count_kept_bytes(base, trainer.flat.route) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(vars(once).values(), vars(again).values(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert not any(module.training for module in base.modules())
    assert [layer.gradient_checkpointing for layer in trainer.flat.memory.layers] == [True, False, False]
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.parameters(), strict=True))


def test_fixed_bytes_are_those_of_the_tensors(folder):
    result = run(*SFT, model=folder, train_dataset=conversations(8, SEED), memory_budget=8, steps=1)
    trainer = result.trainer
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    state = [x for s in trainer.optimizer.state.values() for x in s.values() if x.numel() > 1]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    buffers = tensor_bytes(trainer.model.buffers())
    # Beside the moments Adam has a number of steps per parameter
    assert trainer.flat.memory.needs.fixed == pytest.approx(2 * gradients + buffers + tensor_bytes(state), rel=0.01)


# --- The decision ----------------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("task", [DPO, SFT], ids=["dpo", "sft"])
def test_every_number_of_recomputed_layers_computes_the_same(folder, task, reentrant):
    data = preference_data(8, SEED) if task is DPO else conversations(8, SEED)
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    kwargs = {"peft_config": lora(lora_dropout=0.3)} if task is DPO else {}
    plain = ready(made(task, folder, data, memory_budget=None, trainer_kwargs=dict(kwargs)))
    trainer = ready(made(task, folder, data, **options, trainer_kwargs=dict(kwargs)))
    batch = next(iter(trainer.get_train_dataloader()))
    expected = step(plain, {name: value for name, value in batch.items() if name != "rows"})
    recomputations = []
    for number in range(LAYERS + 1):
        with count_calls(trainer.flat.memory.layers) as calls:
            actual = step(trainer, batch, number)
        recomputations.append(sum(calls))
        assert all(map(torch.equal, expected, actual)), number
    assert np.diff(recomputations).tolist() == [1] * LAYERS


@contextmanager
def count_calls(layers):
    """A list with an entry for each time that a layer computes its MLP."""
    calls = []
    handles = [layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers]
    yield calls
    for handle in handles:
        handle.remove()


def test_a_budget_recomputes_only_what_it_must_and_splits_what_does_not_fit(folder):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps": 2}
    common = {"model": folder, "train_dataset": preference_data(32, SEED)}
    plain = run(*DPO, **common, **options)
    whole = run(*DPO, **common, **options, memory_budget=8)
    same(plain, whole)
    assert {entry["flat/recomputed"] for entry in whole.log_history if "loss" in entry} == {0.0}
    some = run(*DPO, **common, **options, memory_budget=between(whole.trainer, 2))
    same(plain, some)
    shares = [entry["flat/recomputed"] for entry in some.log_history if "loss" in entry]
    assert 0 < sum(shares) < len(shares)
    fixed = whole.trainer.flat.memory.needs.fixed / GIB
    least = fixed + (between(whole.trainer, LAYERS) - fixed) / 2
    parts = run(*DPO, **common, **options, memory_budget=least)
    same_training(plain, parts, ignored=())
    for entry in parts.log_history:
        if "loss" in entry:
            assert entry["flat/predicted_memory_gib"] <= entry["flat/memory_budget_gib"] == pytest.approx(least)
    assert parts.trainer.total_counts().real == plain.trainer.total_counts().real


@pytest.mark.slow
def test_a_budget_that_an_example_does_not_fit_into_is_refused(folder):
    data = preference_data(16, SEED)
    with pytest.raises(ValueError, match=r"`memory_budget=0.0001`.* is less than example \d+ of the.* at least [\d.]+"):
        made(DPO, folder, data, memory_budget="0.0001")
    try:
        made(DPO, folder, data, memory_budget=0.0001)
    except ValueError as error:
        least = float(re.search(r"at least ([\d.]+), or", str(error))[1])
    run(*DPO, model=folder, train_dataset=data, memory_budget=least, steps=1)
    stream = data.to_iterable_dataset()
    with pytest.raises(ValueError, match="is less than an example of the training data needs"):
        run(*DPO, model=folder, train_dataset=stream, memory_budget=0.0001, steps=1)
    run(*DPO, model=folder, train_dataset=stream, memory_budget=least, steps=1)


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("options", "model_type", "overrides"),
    [
        ({"loss_type": ["aot"]}, "llama", {}),
        ({"loss_type": ["sigmoid", "sft"]}, "llama", {}),
        ({"loss_type": ["aot_unpaired"]}, "llama", {}),
        ({}, "mixtral", MOE),
    ],
    ids=["aot", "sft", "aot-unpaired", "routers"],
)
@pytest.mark.parametrize("limit", ["memory", "tokens"])
def test_losses_that_couple_examples_run_in_parts_beneath_the_loss(tokenizer, options, model_type, overrides, limit):
    def common():
        model = make_model(model_type, num_hidden_layers=LAYERS, **overrides)
        kwargs = {"processing_class": tokenizer, "peft_config": lora()}
        common = {"model": model, "train_dataset": preference_data(16, SEED), "trainer_kwargs": kwargs}
        return {**common, "steps": 2, "per_device_train_batch_size": 8, **options}

    padded = run(DPOTrainer, DPOConfig, **common())
    whole = run(*DPO, **common(), memory_budget=8).trainer
    if limit == "memory":
        steps, memory, fixed = whole.flat.steps, whole.flat.memory, whole.flat.memory.needs.fixed
        budget = (fixed + steps.budget.gradient_bytes + 0.7 * (memory.peak(memory.current.batch, LAYERS) - fixed)) / GIB
        limited = {"memory_budget": budget}
    else:
        limited = {"max_tokens_per_micro_batch": 120}
    with parts_beneath() as numbers:
        assert_same(padded, run(*DPO, **common(), **limited))
    assert max(numbers) > 1


@contextmanager
def parts_beneath():
    """How many parts each pass that trains ran in."""
    numbers, divided = [], Budget.decide

    def watch(*args, **kwargs):
        batch = divided(*args, **kwargs)
        numbers.append(len(batch.parts))
        return batch

    Budget.decide = watch
    yield numbers
    Budget.decide = divided


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_offloading": True}, "activation_offloading=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"gradient_checkpointing_kwargs": {"selective": True}}, "'selective': True"),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "'every_n_layers': 2"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'` steps within each backward pass"),
        (
            {"memory_budget": None, "max_tokens_per_micro_batch": 100, "optim": "adalomo"},
            "optim='adalomo'` steps within each backward pass",
        ),
        ({"memory_budget": -1}, "must be a positive number"),
        ({"memory_budget": "much"}, "must be a positive number"),
    ],
)
def test_what_a_budget_cannot_stand_beside_is_refused(folder, options, reason):
    with pytest.raises(ValueError, match=reason):
        made(SFT, folder, conversations(8, SEED), **options)


def test_a_resumed_run_takes_the_same_decisions(folder, tmp_path):
    common = {"model": folder, "train_dataset": preference_data(32, SEED), "memory_budget": "auto"}
    common |= {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "steps": 2}
    first = run(*DPO, **common).trainer
    # As it would be after a failed allocation, and on a GPU
    first.flat.memory.budget, first.flat.memory.has_shrunk = 12345678, True
    first.flat.memory.needs = replace(first.flat.memory.needs, correction=1.5)
    first._save_checkpoint(first.model, None)
    again = made(DPO, **{**common, "steps": 3})
    again.train(resume_from_checkpoint=True)
    assert (again.flat.memory.budget, again.flat.memory.needs.correction) == (12345678, 1.5)


# --- Allocations that fail -------------------------------------------------------------------------------------------


@pytest.mark.drawn(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("split", [False, True], ids=["recomputes", "splits"])
def test_a_failed_allocation_costs_a_warning_and_nothing_else(folder, where, split, caplog):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "max_steps": 2}
    options["disable_dropout"] = split  # what is computed again as a whole is to draw what it drew
    data = preference_data(48, SEED)

    def make(**budget):
        return made(DPO, folder, data, trainer_kwargs={"peft_config": lora(lora_dropout=0.3)}, **options, **budget)

    plain = make(memory_budget=None)
    plain.train()
    trainer = make()
    if split:
        trainer.flat.memory.budget = int(between(trainer, LAYERS) * GIB)
        trainer.flat.memory.needs = replace(trainer.flat.memory.needs, kept=trainer.flat.memory.needs.kept * 100)
    else:  # so small a model is all head
        trainer.flat.memory.needs = replace(trainer.flat.memory.needs, tile=(0, 0))
    # In the second micro-batch, when there are gradients already
    with failing(trainer, {1}, where == "backward"):
        trainer.train()
    assert sum("An allocation failed" in message for message in caplog.messages) == 1
    weights = [dict(t.model.named_parameters()) for t in (plain, trainer)]
    runs = [Trajectory(t.state.log_history, w, t) for t, w in zip((plain, trainer), weights, strict=True)]
    if split:
        same_training(*runs, ignored=())
    else:
        same(*runs)


def test_an_allocation_that_always_fails_ends_the_run(folder):
    trainer = made(DPO, folder, preference_data(16, SEED))
    with failing(trainer, range(1000), False), pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        trainer.train()
    # Who trains the model next decides for himself which layers recompute
    layers = trainer.flat.memory.layers
    recompute_first(layers, 0)
    trainer.flat_base(trainer.model)(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    assert not any(layer.gradient_checkpointing for layer in layers)


def test_other_processes_wait_so_nothing_is_computed_again(folder):
    trainer = made(DPO, folder, preference_data(16, SEED))
    trainer.flat.memory.why_not_again = lambda *_: "Lower `memory_budget`"
    with failing(trainer, {0}, False), pytest.raises(torch.OutOfMemoryError, match="on purpose\nLower `memory_budget`"):
        trainer.train()


@pytest.mark.parametrize(
    ("version", "offloads", "expected"), [(1, False, True), (1, True, False), (2, False, True), (2, True, True)]
)
def test_parts_are_added_up_in_shards_but_where_fsdp1_offloads_them(version, offloads, expected):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=offloads)
    state = SimpleNamespace(fsdp_plugin=plugin)
    assert adds_up_shards(SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)) is expected
    assert not adds_up_shards(SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, state=state))


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


def test_gradients_that_are_computed_again_are_dropped_as_they_come():
    gc.collect()  # an error of a test before may keep a checkpoint open, which would take what is saved here
    layer, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    layer(x).sum().backward()
    attempt = Attempt(layer.parameters(), torch.device("cpu"), put_back=lambda: None)
    layer(x).sum().backward()
    whole = [p.grad.clone() for p in layer.parameters()]
    with attempt.undone():
        layer(x).sum().backward()
        assert all(p.grad is None for p in layer.parameters())
    layer(x).mul(0).sum().backward()  # nothing is dropped any more
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.parameters(), whole, strict=True))


def test_what_comes_to_hold_memory_in_training_corrects_no_prediction_and_is_saved(tmp_path):
    def made(held):
        peak = SimpleNamespace(can_reset=True, held=held, current=held + 100)
        return MemoryBudget(8, 8 * GIB, MemoryNeeds(1000, [[1]], [[1]], [0], [0], (0, 0), [0]), [], None, peak)

    memory = made(held=1500)
    for _ in range(CORRECTED):
        memory.current = Pass(None, 0, 1, 0, 0, False, expected=memory.needs.fixed + 100, held=1500)
        memory.finish(has_stepped=True)
        assert (memory.needs.fixed, memory.needs.correction) == (1500, 1)
    memory.save(tmp_path, 0)
    resumed = made(held=0)
    resumed.load(tmp_path, 0)
    assert resumed.needs == memory.needs
