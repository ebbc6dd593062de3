"""Groups of processes that compute one flat batch together (gloo) train what padded TRL trains in one process."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.architectures import tiny_model, with_head
from tests.helpers.flat_and_padded import flat_model
from tests.helpers.launching import (
    PER_MICRO_BATCH,
    TIMEOUT,
    alone,
    assert_same_run,
    finished,
    launch,
    of_processes,
    torchrun,
)
from tests.helpers.refused import build
from tests.helpers.tiny import SEED, following_rotary, make_model, preference_data, saved
from tests.helpers.trees import random_segments
from trl_paddingfree.core.check import prove
from trl_paddingfree.core.check.prove import CheckResult, UnprovenModelError
from trl_paddingfree.core.flat.batch import FlatBatch
from trl_paddingfree.core.flat.layout import FlatLayout
from trl_paddingfree.core.flat.schedule import Schedule
from trl_paddingfree.core.model.routes import choose_route
from trl_paddingfree.core.model.told import FlatMask, OtherSlices, PassContext
from trl_paddingfree.groups.check import GroupCheck, refuse_unshareable
from trl_paddingfree.groups.exchange import Halo, head_shares, share_sizes, span_of
from trl_paddingfree.groups.sequence import SequenceGroup, owners_of, scored_sizes, share_of
from trl_paddingfree.recurrent.tree import tree_functions
from trl_paddingfree.spans import cut_by_number

# Sums over slices round as often as sums over micro-batches do, and no figure is a sum over other examples
ROUNDING = 2e-5
EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
WIDE = {"hidden_size": 48, "num_attention_heads": 6}
MODELS = {
    "llama": make_model,
    "one key head": partial(make_model, num_key_value_heads=1),
    "6 and 3 heads": partial(make_model, num_key_value_heads=3, **WIDE),
    "6 and 2 heads": partial(make_model, num_key_value_heads=2, **WIDE),
    **{name: partial(tiny_model, name) for name in ("mistral", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "gpt2")},
    "dynamic": partial(make_model, **following_rotary(24, "dynamic")),
    **{name: partial(tiny_model, name) for name in ("qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "jamba")},
    "6 and 3 state heads": partial(tiny_model, "qwen3_5_text", linear_num_value_heads=6, linear_num_key_heads=3),
}
EVALUATED = {"evaluate": 9, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
IN_PARTS = {"max_tokens_per_micro_batch": 60}
# Gradients of decays cancel to a hundredth of their parts, and Adam would divide what is left by its own size
SGD = {"optim": "sgd", "learning_rate": 0.1}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "ddp_find_unused_parameters": False}
# Task, model and options of a run. Those of the first few run by default
CASES = {
    "LoRA, ragged evaluation": ("dpo", "llama", {"lora": True, **EVALUATED}),
    "router loss, coupled parts": ("dpo", "mixtral", {"router_aux_loss_coef": 0.1, **IN_PARTS}),
    "packing, accumulation": ("sft", "6 and 3 heads", {"packing": True, "max_length": 32, "accumulate": 2}),
    "memory budget": ("dpo", "one key head", {"memory_budget": 1, "tokens_in_memory": 250}),
    "delta rule, LoRA": ("dpo", "qwen3_5_text", {"lora": True, "accumulate": 2, **SGD}),
    "all weights": ("dpo", "llama", {}),
    "sft": ("sft", "llama", EVALUATED),
    "sft, shared": ("sft", "llama", {"prefix_sharing": True}),
    "6 and 2 heads": ("dpo", "6 and 2 heads", {}),
    "windows": ("dpo", "mistral", {}),
    "soft-capping": ("dpo", "gemma2", EAGER),
    "sinks": ("dpo", "gpt_oss", {**EAGER, "router_aux_loss_coef": 0.0}),
    "narrow values": ("sft", "deepseek_v3", {"prefix_sharing": True}),
    "learned positions": ("sft", "gpt2", {}),
    "router loss": ("sft", "mixtral", {"router_aux_loss_coef": 0.1, "accumulate": 2}),
    "reentrant": ("dpo", "llama", {"lora": True, "gradient_checkpointing": True, **REENTRANT}),
    "precomputed": ("dpo", "llama", {"precompute_ref_log_probs": True, "on_disk": True, **EVALUATED}),
    "parts": ("dpo", "llama", IN_PARTS),
    "coupled parts": ("dpo", "llama", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], **IN_PARTS}),
    "parts of sft, workers": ("sft", "llama", {"dataloader_num_workers": 1, **IN_PARTS}),
    "dft": ("sft", "llama", {"loss_type": "dft"}),
    "incomplete last batch": ("dpo", "llama", {"per_device_train_batch_size": 20, "max_steps": 3}),
    "incomplete last batch of sft": ("sft", "llama", {"per_device_train_batch_size": 20, "max_steps": 3}),
    "arranged": ("dpo", "llama", {"arrange_micro_batches": "tokens", "accumulate": 2}),
    "streaming, workers": ("dpo", "llama", {"streams": True, "dataloader_num_workers": 1}),
    "normalized by process": ("sft", "llama", {"average_tokens_across_devices": False}),
    "weighted": ("dpo", "llama", {"use_weighting": True, "loss_type": ["ipo"]}),
    "counted tokens": ("sft", "llama", {"include_num_input_tokens_seen": "non_padding"}),
    "sorted": ("dpo", "llama", {"loss_type": ["aot"]}),
    "rotary limit in reach of none": ("dpo", "dynamic", {"max_length": 24}),
    "delta rule": ("dpo", "qwen3_5_text", {"prefix_sharing": False, **SGD}),
    "delta rule, checkpointing": ("dpo", "qwen3_5_text", {"gradient_checkpointing": True, **SGD}),
    "delta rule, parts": ("dpo", "qwen3_5_text", {"max_tokens_per_micro_batch": 150, **SGD}),
    "delta rule, memory budget": ("dpo", "qwen3_5_text", {"memory_budget": 1, "tokens_in_memory": 250, **SGD}),
    "delta rule, measured budget": ("dpo", "qwen3_5_text", {"memory_budget": 1, **SGD}),
    "delta rule of sft": ("sft", "6 and 3 state heads", {"prefix_sharing": True, **EVALUATED, **SGD}),
    "short convolution": ("dpo", "lfm2", {"gradient_checkpointing": True, "accumulate": 2, **SGD}),
    "short convolution of sft": ("sft", "lfm2", {"prefix_sharing": True, **EVALUATED, **SGD}),
    "scan beside attention": ("dpo", "falcon_h1", SGD),
    "scan alone": ("sft", "mamba2", {"max_tokens_per_micro_batch": 150, **SGD}),
    "scan of channels": ("dpo", "jamba", {"router_aux_loss_coef": 0.0, **SGD}),
}
DEFAULT = list(CASES)[:5]
STATES = ["delta rule", "delta rule, checkpointing", "delta rule, parts", "delta rule, memory budget"]
STATES += ["delta rule of sft", "short convolution", "scan beside attention", "scan alone", "scan of channels"]
# Of four processes: those whose heads, examples or gathers differ from two's
OF_FOUR = ["LoRA, ragged evaluation", "router loss, coupled parts", "packing, accumulation", "6 and 2 heads", "windows"]
OF_FOUR += ["soft-capping", "sinks", "narrow values", "parts", "sft"]
OF_FOUR += ["all weights", "memory budget", "delta rule, LoRA", "delta rule of sft", "short convolution"]
OF_FOUR += ["scan beside attention"]
# An example's loss depends on others of its micro-batch, TRL normalizes by process, or gives processes others of a
# stream, or examples twice where batches do not divide
NOT_IN_TWO_GROUPS = ("router loss", "sorted", "coupled", "process", "streaming", "incomplete")
# Evaluations of several groups are means over what each group has, in TRL's trainers of several processes as well
IN_ONE_GROUP = ("evaluation", "sft", "precomputed")
# What only our trainers know: the padded run goes without
OURS = ("prefix_sharing", "max_tokens_per_micro_batch", "memory_budget", "tokens_in_memory", "arrange_micro_batches")
# Figures that depend on the machine, or on what its memory was predicted to need
OF_THE_MACHINE = ("runtime", "per_second", "memory", "recomputed")


@pytest.fixture(scope="session")
def folder_of(tokenizer, tmp_path_factory):
    """The folder of each model, made when it is asked for."""
    folder = tmp_path_factory.mktemp("models")

    def made(name):
        path = folder / name
        if not path.exists():
            saved(path, MODELS[name](vocab_size=len(tokenizer)), tokenizer)
        return str(path)

    return made


def settings(options, groups=1, **more):
    """Options of a run of so many groups, with the same examples per step."""
    options = {"max_steps": 2, "per_device_train_batch_size": 4, **options}
    accumulate = options.pop("accumulate", 1)
    options["per_device_train_batch_size"] //= groups * accumulate
    if "per_device_eval_batch_size" in options:
        options["per_device_eval_batch_size"] //= groups
    return {**options, "gradient_accumulation_steps": accumulate, **more}


def padded_settings(options, groups=1):
    return settings({x: y for x, y in options.items() if x not in OURS}, groups, padding_free=False)


def figures(run):
    """Every logged figure but those of the machine."""
    logged = {(e["step"], name): x for e in run["log"] for name, x in e.items()}
    return {key: x for key, x in logged.items() if not any(part in key[1] for part in OF_THE_MACHINE)}


def assert_as_padded(folder_of, tmp_path, world, size, names, engine=None):
    """Beside padded TRL in one process. With several groups, metrics that are means over micro-batches differ."""
    groups, runs = world // size, {}
    for name in names:
        task, model, options = CASES[name]
        given = settings(options, groups, sequence_parallel_size=size)
        runs[name] = task, folder_of(model), tmp_path / f"{name} many", given
    for name, result in zip(names, launch(world, *runs.values(), engine=engine), strict=True):
        task, model, options = CASES[name]
        assert result["world"] == world
        one = alone(task, folder_of(model), tmp_path / f"{name} padded", padded_settings(options))
        ignore = () if groups == 1 and name != "arranged" else PER_MICRO_BATCH
        assert_same_run(one, result, weights=not engine, ignore=ignore)
        if groups == 1:  # and the figures that TRL does not have
            ours = settings({x: y for x, y in options.items() if x != "tokens_in_memory"})
            expected = figures(alone(task, folder_of(model), tmp_path / f"{name} one", ours))
            found = figures(result)
            assert found.keys() == expected.keys()
            for key, figure in expected.items():
                if "accuracies" in key[1]:
                    continue
                assert found[key] == pytest.approx(figure, rel=ROUNDING, abs=ROUNDING), key


def test_a_group_of_two_trains_what_padded_trl_trains(folder_of, tmp_path):
    assert_as_padded(folder_of, tmp_path, 2, 2, DEFAULT)
    decided = of_processes(tmp_path / "memory budget many")
    assert decided[0] == decided[1]
    assert any(recomputed for _, (_, recomputed) in decided[0])


def in_two_groups():
    left_out = (*NOT_IN_TWO_GROUPS, *IN_ONE_GROUP)
    return [name for name in CASES if not any(part in name for part in left_out)]


# Processes, those of a group, the engine, and cases. Of three, heads and tokens do not divide
GROUPS = {
    "all ways": (2, 2, None, [name for name in CASES if name not in DEFAULT][::2]),
    "other ways": (2, 2, None, [name for name in CASES if name not in DEFAULT][1::2]),
    "four": (4, 4, None, OF_FOUR),
    "three": (3, 3, None, STATES),
    "two of two": (4, 2, None, in_two_groups()),
    "fsdp": (2, 2, "fsdp", ["all weights", "sft", "parts", "memory budget"]),
    "fsdp, two of two": (4, 2, "fsdp", ["all weights", "parts"]),
    "fsdp, delta rule": (2, 2, "fsdp-qwen3_5", STATES[:4]),
    "fsdp, delta rule, two of two": (4, 2, "fsdp-qwen3_5", STATES[:2]),
    "fsdp, convolution": (2, 2, "fsdp-lfm2", ["short convolution"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_groups_train_what_padded_trl_trains(folder_of, tmp_path, name):
    world, size, engine, names = GROUPS[name]
    assert_as_padded(folder_of, tmp_path, world, size, names, engine)


@pytest.mark.slow
def test_two_groups_of_two_train_what_padded_trl_trains_in_two_processes(folder_of, tmp_path):
    """Every figure, where it depends on which examples share a process."""
    names = ["LoRA, ragged evaluation", "sft", "router loss", "sorted", "coupled parts", "streaming, workers"]
    names += ["normalized by process", "precomputed", "packing, accumulation", "incomplete last batch"]
    names += ["incomplete last batch of sft", "counted tokens"]
    ours, padded = [], []
    for name in names:
        task, model, options = CASES[name]
        given = settings(options, 2, sequence_parallel_size=2)
        ours.append((task, folder_of(model), tmp_path / f"{name} ours", given))
        padded.append((task, folder_of(model), tmp_path / f"{name} padded", padded_settings(options, 2)))
    for one, other in zip(launch(2, *padded), launch(4, *ours), strict=True):
        assert_same_run(one, other, ignore=())


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_groups_of_zero_train_what_padded_trl_trains(folder_of, tmp_path, engine):
    pytest.importorskip("deepspeed")
    assert_as_padded(folder_of, tmp_path, 2, 2, ["all weights", "sft", "delta rule"], engine=engine)


@pytest.mark.slow
def test_a_resumed_run_of_a_group_goes_on(folder_of, tmp_path):
    options = settings({"lora": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "memory_budget": 1})
    options |= {"sequence_parallel_size": 2}
    (whole,) = launch(2, ("dpo", folder_of("llama"), tmp_path / "whole", options))
    options |= {"resume": str(tmp_path / "whole" / "checkpoint-2"), "save_strategy": "no"}
    (resumed,) = launch(2, ("dpo", folder_of("llama"), tmp_path / "resumed", options))
    whole["log"], resumed["log"] = whole["log"][:4], resumed["log"][:4]
    assert_same_run(whole, resumed, ignore=["num_tokens"])  # TRL counts from the start of a run


REFUSED = {
    "size": ("dpo", "llama", {"sequence_parallel_size": 3}, "does not divide the 2 processes"),
    "backend": ("sft", "llama", {"flat_attention": "mask"}, "its attention is computed by mask"),
    "rotary": ("dpo", "dynamic", {"max_length": 48}, "`rope_type='dynamic'`, a row of more than 24 tokens"),
    "padded": ("dpo", "llama", {"padding_free": False}, "Leave it out for padded rows"),
    "logits": ("sft", "llama", {"label_smoothing_factor": 0.1}, "cannot be combined with `label_smoothing_factor`"),
    "sampler": ("dpo", "llama", {"train_sampling_strategy": "batch_rebalance"}, "examples of its own"),
    "compiled": ("dpo", "llama", {"torch_compile": True}, "cannot be combined with `torch_compile`"),
    "different": ("dpo", "llama", {"differs": True}, "got different batches"),
}


def test_what_slices_cannot_do_is_refused_by_all_processes(folder_of, tmp_path):
    runs = []
    for name, (task, model, options, _) in REFUSED.items():
        given = {"sequence_parallel_size": 2, "refused": True, **settings(options)}
        runs.append((task, folder_of(model), tmp_path / name, given))
    launch(2, *runs)
    for name, (*_, message) in REFUSED.items():
        for said in of_processes(tmp_path / name):
            assert message in said, name
            assert "sequence_parallel_size" in said, name


EIGHT = {"num_attention_heads": 8}
# A model, its options, the most processes that it can serve, and why no more
SERVED = [
    ("falcon", {}, 1, "cannot serve FalconForCausalLM: its attention is computed by mask"),
    ("llama4_text", {}, 1, "scale queries by their place"),
    ("llama", {}, 4, "it has 4 attention heads"),
    *((name, EIGHT, 4, "layers that carry state have 4 heads, and each") for name in ("qwen3_5_text", "falcon_h1")),
    ("kimi_linear", {**EIGHT, "linear_num_heads": 4}, 4, "layers that carry state have 4 heads, and each"),
    ("mamba2", {}, 4, "layers that carry state have 4 heads, and each"),
    *((name, EIGHT, 8, "it has 8 attention heads") for name in ("lfm2", "jamba")),
]


def test_more_processes_than_a_model_can_serve_are_refused_by_name():
    for model_type, options, most, reason in SERVED:
        model = with_head(tiny_model(model_type, **options))
        route = choose_route(model)
        if most > 1:
            refuse_unshareable(model, route, most)
        with pytest.raises(ValueError, match=reason):
            refuse_unshareable(model, route, most + 1)


@pytest.mark.parametrize("model_type", ["minimax", "inkling_text"])
def test_layers_that_see_rows_are_refused_by_name(model_type):
    model = tiny_model(model_type)
    with pytest.raises(ValueError, match=r"of the class \w+ hand a state on from token to token within whole rows"):
        refuse_unshareable(model, choose_route(model), 2)


def test_tokens_that_stand_in_for_empty_slices_are_not_gathered():
    rows = [[0, 1, 2], [3, 4]]  # each token is its place on the flat axis
    whole = FlatBatch.from_rows(rows, rows)
    for cuts in ((0, 5), (0, 0, 2, 2, 5), (0, 1, 1, 5)):
        batch = replace(whole, schedule=Schedule(cuts))
        for rank in range(2):
            group = SimpleNamespace(rank=rank, size=2, _gathered=lambda values, owners, layout: values)
            own = SequenceGroup.gather_tokens(group, share_of(batch, rank, 2).input_ids[0], batch)
            assert own.tolist() == np.flatnonzero(owners_of(5, 2, cuts) == rank).tolist()


def test_processes_of_a_group_compare_their_batches_on_the_host():
    rows = [[7] * 20, [7, 8], [9] * 5]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, batch = SequenceGroup(dist.group.WORLD, torch.device("meta")), FlatBatch.from_rows(rows, rows)
        assert group.own_share(batch.to("meta"), tiny_model("llama").config).input_ids.shape == batch.input_ids.shape
        group.largest = lambda values: [1, 0]  # another process has another batch
        with pytest.raises(ValueError, match="got different batches"):
            group.own_share(FlatBatch.from_rows(rows, rows), tiny_model("llama").config)
    finally:
        dist.destroy_process_group()


def test_slices_that_fail_are_not_tried_on_rows(monkeypatch):
    model, tried = tiny_model("qwen3_5_text"), []
    flat_model(model).peers = SimpleNamespace(name="`sequence_parallel_size=2`")
    routes = object.__new__(GroupCheck).routes(model, choose_route(model), fallback=True)

    def fail(model, route, *_):
        tried.append(route)
        return CheckResult(route, failure="wrong")

    monkeypatch.setattr(prove, "check_flat", fail)
    with pytest.raises(UnprovenModelError, match="`sequence_parallel_size=2`"):
        prove.prove(model, choose_route(model), routes=routes)
    assert [(route.states, route.prefix_sharing) for route in tried] == [("tree", True), ("tree", False)]


# --- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_slices_are_the_batch(size):
    rng = np.random.default_rng(SEED)
    rows = [rng.integers(5, 60, length).tolist() for length in rng.integers(2, 40, 6)]
    batch = FlatBatch.from_rows(rows, [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in rows])
    total, slices = batch.input_ids.size(1), [share_of(batch, i, size) for i in range(size)]
    sizes, numbers = share_sizes(total, size), scored_sizes(batch, size)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1 if total >= 2 * size else set(sizes) <= {0, 2, 3}
    assert sum(numbers) == batch.shift_labels.size(1)
    parts = zip(slices, sizes, numbers, cut_by_number(total, size), strict=False)
    whole = [(x.input_ids[0, :n], x.shift_labels[0, :p], x.scored_index[:p] + first) for x, n, p, first in parts]
    tokens, targets, index = map(torch.cat, zip(*whole, strict=True))
    assert torch.equal(tokens, batch.input_ids[0])
    assert torch.equal(targets, batch.shift_labels[0])
    assert torch.equal(index, batch.scored_index)
    for each, scored in zip(slices, numbers, strict=True):
        assert each.input_ids.size(1) > 1  # not one token, as in generation
        # A model scores something, or is told that it does not
        assert scored or each.shift_labels.tolist() == [[-100]]


def test_every_query_head_reads_its_key_head():
    for num_heads, num_keys in ((8, 8), (8, 2), (8, 1), (6, 3), (9, 3), (12, 4), (14, 2)):
        for size in range(1, 7):
            shares = head_shares(num_heads, num_keys, size)
            assert [head for queries, _ in shares for head in queries] == list(range(num_heads))
            for queries, keys in shares:
                assert len(queries) % len(keys) == 0
                repeated = [key for key in keys for _ in range(len(queries) // len(keys))]
                assert repeated == [head // (num_heads // num_keys) for head in queries]


class Given(OtherSlices):
    """What slices get of a convolution, from all tokens: as messages would bring it."""

    def __init__(self, states, number, size):
        self.states, self.number, self.size = states, number, size

    def span(self, num_tokens):
        return span_of(num_tokens, self.number, self.size)

    def with_context(self, layout, states, size):
        """Every process is sent what the other processes hold for it, in the order of the flat axis."""
        halos = [Halo.of(layout, size, i, self.size) for i in range(self.size)]
        total, received = layout.segments.num_tokens, []
        for i, halo in enumerate(halos):
            held = self.states[list(span_of(total, i, self.size))][halo.rows.index]
            first = sum(halo.sent[: self.number])
            assert halo.sent[self.number] == halos[self.number].received[i]
            received.append(held[first : first + halo.sent[self.number]])
        assert halos[self.number].is_needed == any(sum(halo.received) for halo in halos)
        return torch.cat([states, *received])


@pytest.mark.parametrize("draw", range(SEED, SEED + 8))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_a_halo_brings_each_slice_what_its_convolution_reaches(size, draw):
    """Slices of a convolution along random trees, of one that sums up what it reaches with weights of its own."""
    whole = FlatLayout.from_segments(random_segments(draw))
    total = whole.segments.num_tokens
    states = torch.randn(total, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(draw))
    weight = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(draw + 1))

    def convolution(axis, weight, bias, activation):
        return torch.nn.functional.conv1d(axis, weight[:, None], groups=3, padding=3)[..., : axis.size(-1)]

    def convolved(mask, states):
        functions = tree_functions(mask.context, {"causal_conv1d_fn": convolution}, ())
        return functions["causal_conv1d_fn"](states.T[None], weight)[0].T

    found = []
    for number in range(size):
        own = states[list(span_of(total, number, size))]
        mask = FlatMask.carrying(PassContext(whole, others=Given(states, number, size)), per_token=True)
        assert mask.shape == (1, len(own))
        found.append(convolved(mask, own)[: share_sizes(total, size)[number]])
    rows = [states[whole.segments.path(i)] for i in range(len(whole.segments.lengths))]
    alone = [
        convolution(row.T[None], weight, None, None)[0].T[-n:]
        for row, n in zip(rows, whole.segments.lengths, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found), torch.cat(alone))
    # No more is sent than what is reached: for each slice, and for each segment that begins, as far as the kernel goes
    sent = sum(sum(Halo.of(whole, 3, i, size).sent) for i in range(size))
    assert sent <= 3 * (size - 1 + len(whole.segments.lengths))


# --- work and memory --------------------------------------------------------------------------------------------------


def counted(world, module="sequence_counts", *arguments):
    finished(torchrun(world, "-m", f"tests.groups.{module}", *arguments), 3 * TIMEOUT)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_work_memory_and_messages(world):
    counted(world)


def test_layers_with_a_state_answer_in_two_slices_as_whole():
    counted(2, "sequence_states", str(SEED), "qwen3_5_text", "lfm2", "bamba", "mamba")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_layers_with_a_state_answer_in_slices_as_whole(world):
    counted(world, "sequence_states", str(SEED))


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        ("reward", {}, "`sequence_parallel_size=2`: DPO and SFT .* for RewardTrainer's batches"),
        (
            "dpo",
            {"train_dataset": preference_data(4, SEED).add_column("image", [None] * 4)},
            "images are not computed in slices",
        ),
    ],
)
def test_what_groups_cannot_share_is_refused_before_training(task, data, message):
    with pytest.raises(ValueError, match=message):
        build(task, sequence_parallel_size=2, **data)
