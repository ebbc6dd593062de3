"""Packed forwards, right ones and wrong ones: how many of them does `check_packed` judge rightly?"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout, linear

from tests.anywhere.test_packed import padded
from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model
from trl_paddingfree import check_packed
from trl_paddingfree.check.packed import by_positions

Forward = Callable[[Any, list[torch.Tensor]], Any]


def alone(model, rows):
    """Each row by itself: right, whatever the model."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]


def packed(model, rows, positions=None, mask=None, **options):
    """All rows as one, with a mask of blocks, and positions of each row by default."""
    owner = torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)])
    places = torch.cat([torch.arange(len(row)) for row in rows]) if positions is None else positions
    blocks = (owner[:, None] == owner) if mask is None else mask
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    given = {"attention_mask": (blocks & causal)[None, None], "position_ids": places[None], "use_cache": False}
    return model(input_ids=torch.cat(rows)[None], **given, **options).logits[0].split([len(row) for row in rows])


def owners(rows):
    return torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)])


def places(rows):
    return torch.cat([torch.arange(len(row)) for row in rows])


def total(rows):
    return sum(map(len, rows))


def leaky(model, rows, when=lambda model, rows: True, size=1.0):
    """With everything seen by everything before it where a condition is met."""
    if not when(model, rows):
        return packed(model, rows)
    return packed(model, rows, mask=torch.ones(total(rows), total(rows), dtype=torch.bool))


def mixes_in_layer(number, when=lambda model, rows: True, size=1e-2):
    """Rows one by one, of which each gets something of the one before it in a layer."""

    def forward(model, rows):
        last = []

        def add(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if last and when(model, rows):
                moved = hidden + size * last[0].mean(1, keepdim=True)
                args, kwargs = ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})
            last[:] = [hidden]
            return args, kwargs

        with model.base_model.layers[number].register_forward_pre_hook(add, with_kwargs=True):
            return alone(model, rows)

    return forward


def masked(change):
    """With a mask of blocks that `change(mask, rows)` spoils."""

    def forward(model, rows):
        owner = owners(rows)
        return packed(model, rows, mask=change(owner[:, None] == owner, rows))

    return forward


def placed(change):
    """With positions that `change(positions, rows)` spoils."""
    return lambda model, rows: packed(model, rows, positions=change(places(rows), rows))


def with_weight(name, change):
    """With another tensor, equal in value, in the place of a parameter."""

    def forward(model, rows):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        weight = module._parameters.pop(last)
        setattr(module, last, change(weight))
        try:
            return packed(model, rows)
        finally:
            delattr(module, last)
            module._parameters[last] = weight

    return forward


lost = torch.Tensor.detach


def half(weight):
    return (weight + weight.detach()) / 2


def part_of(weight):
    kept = torch.arange(len(weight))[:, None] % 4 > 0
    return torch.where(kept.view(-1, *[1] * (weight.ndim - 1)), weight, weight.detach())


@contextmanager
def training(model) -> Iterator[None]:
    before = model.training
    model.train()
    yield
    model.train(before)


def trains(model, rows):
    with training(model):
        return packed(model, rows)


def stays_in_training(model, rows):
    model.train()
    return packed(model, rows)


def autocast(model, rows):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return packed(model, rows)


def by_length(model, rows):
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    answers = packed(model, [rows[i] for i in order])
    return [answers[order.index(i)] for i in range(len(rows))]


def in_bins(model, rows):
    """Two documents in each row of a batch."""
    answers = []
    for start in range(0, len(rows), 2):
        answers += packed(model, rows[start : start + 2])
    return answers


def after_others(model, rows):
    """Documents that are not asked for stand between the others."""
    other = torch.arange(7) + 1
    return packed(model, [x for row in rows for x in (row, other)])[::2]


def own_window(size):
    def forward(model, rows):
        distance = torch.arange(total(rows))[:, None] - torch.arange(total(rows))
        owner = owners(rows)
        return packed(model, rows, mask=(owner[:, None] == owner) & (distance < size))

    return forward


def keeps_last_call(model, rows, kept=None):
    kept = [] if kept is None else kept
    before = kept[-1] if kept else rows[0][:3]
    kept[:] = [rows[-1][:3]]
    return [x[len(before) :] for x in alone(model, [torch.cat([before, row]) for row in rows])]


def only_training(forward, otherwise=packed):
    return lambda model, rows: forward(model, rows) if model.training else otherwise(model, rows)


def only_with_gradients(forward):
    return lambda model, rows: (forward if torch.is_grad_enabled() else packed)(model, rows)


def scaled_by(factor):
    return lambda model, rows: [x * factor for x in packed(model, rows)]


def drops(model, rows):
    return [dropout(x, 0.1) for x in packed(model, rows)]


def checkpointed(model, rows):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return packed(model, rows)
    finally:
        model.gradient_checkpointing_disable()


def head_in_parts(detached=None):
    def forward(model, rows):
        hidden = []
        with model.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0])):
            packed(model, rows)
        weight = model.lm_head.weight if detached is None else detached(model.lm_head.weight)
        return torch.cat([linear(x, weight) for x in hidden[0][0].split(64)]).split([len(row) for row in rows])

    return forward


def tiny(**options):
    return lambda: make_model(**{"vocab_size": 69, "max_position_embeddings": 4096, **options})


def deep():
    return make_model(num_hidden_layers=6, max_position_embeddings=4096)


def wide():
    """A model with weights that are too large to compare whole: the head has 300,000 entries and more."""
    return make_model(vocab_size=10_000, max_position_embeddings=4096)


def windowed(size=512):
    return make_model("mistral", sliding_window=size, max_position_embeddings=4096)


def dropping():
    return make_model(attention_dropout=0.2, max_position_embeddings=4096)


def of(model_type, **options):
    return lambda: tiny_model(model_type, **options)


def low():
    return make_model(dtype=torch.bfloat16, max_position_embeddings=4096)


many = lambda model, rows: len(rows) > 4  # noqa: E731
long = lambda model, rows: total(rows) > 512  # noqa: E731
longer = lambda model, rows: total(rows) > 1024  # noqa: E731
in_training = lambda model, rows: model.training  # noqa: E731


def from_position(least):
    """A mask that forgets documents for queries beyond a place of their document."""
    return masked(lambda mask, rows: mask | (places(rows) >= least)[:, None])


def in_pairs(mask, rows):
    """Documents 0 and 1 see one another, 2 and 3, and so on."""
    return owners(rows)[:, None] // 2 == owners(rows) // 2


def last_two(mask, rows):
    """The last two documents see one another."""
    is_last = owners(rows) >= len(rows) - 2
    return mask | is_last & is_last[:, None]


def lost_rows(model, rows):
    return [x if i % 2 else x.detach() + 0 * x for i, x in enumerate(packed(model, rows))]


# What is planted, in which model, and what it is
RIGHT: dict[str, tuple[Callable[[], Any], Forward]] = {
    "mask of blocks": (tiny(), packed),
    "by positions": (tiny(), by_positions),
    "one by one": (tiny(), alone),
    "padded": (tiny(), padded),
    "by length": (tiny(), by_length),
    "in bins": (tiny(), in_bins),
    "others between": (tiny(), after_others),
    "positions from 5 on, which rotary ones do not see": (tiny(), placed(lambda p, rows: p + 5)),
    "positions that go on, under a mask": (tiny(), placed(lambda p, rows: torch.arange(len(p)))),
    "bfloat16": (low, packed),
    "logits in float32 of bfloat16": (low, lambda model, rows: [x.float() for x in packed(model, rows)]),
    "autocast over float32": (tiny(), autocast),
    "a window of its own": (windowed, own_window(512)),
    "a window that the model has": (windowed, by_positions),
    "a window of 100 of its own": (partial(windowed, 100), own_window(100)),
    "train() within": (tiny(), trains),
    "train() that stays, with dropout": (dropping, stays_in_training),
    "train() with dropout": (dropping, trains),
    "gradient checkpoints": (tiny(), checkpointed),
    "head in parts": (tiny(), head_in_parts()),
    "experts": (of("mixtral"), by_positions),
    "experts in bfloat16": (of("qwen3_moe", dtype=torch.bfloat16), by_positions),
    "layers with state, one by one": (of("lfm2"), alone),
    "large weights": (wide, packed),
    "six layers": (deep, packed),
    "all weights frozen": (lambda: make_model().requires_grad_(False), by_positions),
}
WRONG: dict[str, tuple[Callable[[], Any], Forward]] = {
    "no boundaries": (tiny(), leaky),
    "leak with more than 4 documents": (tiny(), partial(leaky, when=many)),
    "leak with more than 6 documents": (tiny(), partial(leaky, when=lambda model, rows: len(rows) > 6)),
    "leak with an odd number of documents": (tiny(), partial(leaky, when=lambda model, rows: len(rows) % 2)),
    "leak above 512 tokens": (tiny(), partial(leaky, when=long)),
    "leak above 1,024 tokens": (tiny(), partial(leaky, when=longer)),
    "leak above 1,024 tokens in training": (
        tiny(), partial(leaky, when=lambda model, rows: model.training and total(rows) > 1024)),
    "leak above 4 documents in training": (
        tiny(), partial(leaky, when=lambda model, rows: model.training and len(rows) > 4)),
    "leak from position 110 on": (tiny(), from_position(110)),
    "leak from position 300 on": (tiny(), from_position(300)),
    "leak from position 1,000 on": (tiny(), from_position(1000)),
    "leak at first tokens": (tiny(), masked(lambda mask, rows: mask | (places(rows) == 0)[:, None])),
    "leak across the last boundary": (tiny(), masked(last_two)),
    "boundaries off by one": (tiny(), masked(lambda mask, rows: mask.roll((1, 1), (0, 1)))),
    "leak of the token before": (
        tiny(), masked(lambda mask, rows: mask | torch.ones_like(mask).tril(-1).triu(-1))),
    "leak between neighbours in pairs": (tiny(), masked(in_pairs)),
    "leak in training": (tiny(), partial(leaky, when=in_training)),
    "leak where gradients are on": (tiny(), only_with_gradients(leaky)),
    "leak where they are off": (tiny(), partial(leaky, when=lambda model, rows: not torch.is_grad_enabled())),
    **{f"leak in layer {i}": (deep, mixes_in_layer(i)) for i in (0, 3)},
    **{f"leak in layer {i} in training": (deep, mixes_in_layer(i, in_training)) for i in (1, 2, 4, 5)},
    "a small leak": (tiny(), mixes_in_layer(0, size=1e-4)),
    "a small leak in layer 3 with many": (deep, mixes_in_layer(3, many, 1e-4)),
    "leak of the call before": (tiny(), partial(keeps_last_call, kept=[])),
    "layers with state": (of("lfm2"), by_positions),
    "layers with state and chunks": (of("qwen3_next"), by_positions),
    "sinks": (of("gpt_oss"), by_positions),
    "leak in bfloat16": (low, leaky),
    "leak in bfloat16 with many": (low, partial(leaky, when=many)),
    "positions that start again elsewhere": (tiny(), placed(lambda p, rows: torch.arange(len(p)) % 97)),
    "positions of GPT-2 that go on": (of("gpt2"), placed(lambda p, rows: torch.arange(len(p)) % 500)),
    "positions doubled": (tiny(), placed(lambda p, rows: 2 * p)),
    "positions that end at 127": (tiny(), placed(lambda p, rows: p.clamp(max=127))),
    "positions that end at 1,023": (tiny(), placed(lambda p, rows: p.clamp(max=1023))),
    "positions of GPT-2 from 1 on": (of("gpt2"), placed(lambda p, rows: p + 1)),
    "positions wrong in training": (tiny(), only_training(placed(lambda p, rows: 2 * p))),
    "positions wrong with many": (tiny(), placed(lambda p, rows: p * (1 + (len(rows) > 4)))),
    "a window that is not there": (tiny(), own_window(64)),
    "a window of 300 for 512": (windowed, own_window(300)),
    "no window": (windowed, packed),
    "a window that is longer by one": (partial(windowed, 100), own_window(101)),
    "context of 96 tokens": (tiny(), own_window(96)),
    "context of 700 tokens": (tiny(), own_window(700)),
    "half a gradient": (tiny(), lambda model, rows: [half(x) for x in packed(model, rows)]),
    "no gradient of some rows": (tiny(), lost_rows),
    "no gradient": (tiny(), lambda model, rows: [x.detach() for x in packed(model, rows)]),
    "gradients twice": (tiny(), lambda model, rows: [2 * x - x.detach() for x in packed(model, rows)]),
    "half a gradient of the head": (wide, head_in_parts(half)),
    "no gradient of the head": (wide, head_in_parts(lost)),
    "no gradient of a part of the head": (wide, head_in_parts(part_of)),
    "half a gradient of a small weight": (tiny(), with_weight("model.layers.1.self_attn.k_proj.weight", half)),
    "no gradient of a small weight": (tiny(), with_weight("model.layers.0.self_attn.k_proj.weight", lost)),
    "no gradient of a norm": (tiny(), with_weight("model.norm.weight", lost)),
    "half a gradient of a layer between": (deep, with_weight("model.layers.3.mlp.down_proj.weight", half)),
    "other order": (tiny(), lambda model, rows: packed(model, rows)[:: -1 if len({*map(len, rows)}) == 1 else 1]),
    "logits scaled": (tiny(), scaled_by(1.01)),
    "logits in bfloat16": (tiny(), lambda model, rows: [x.bfloat16().float() for x in packed(model, rows)]),
    "computes in bfloat16": (tiny(), lambda model, rows: packed(copy.deepcopy(model).bfloat16(), rows)),
    "forgets the last document": (tiny(), lambda model, rows: packed(model, rows)[:-1]),
    "shifted by one": (tiny(), lambda model, rows: [torch.cat([x[:1], x[:-1]]) for x in packed(model, rows)]),
    "draws at random": (tiny(), drops),
}  # fmt: skip
# Those that the default suite tries, one of each kind; the others are slow, and counted
SOME = ("autocast over float32", "a window of its own", "train() that stays, with dropout", "experts in bfloat16",
        "leak with more than 4 documents", "leak above 1,024 tokens", "leak from position 1,000 on",
        "leak in layer 4 in training", "half a gradient of the head", "no gradient of a small weight",
        "a window of 300 for 512", "draws at random")  # fmt: skip
CASES = {(kind, name): case for kind, each in (("right", RIGHT), ("wrong", WRONG)) for name, case in each.items()}


def judged(kind: str, name: str) -> str:
    """What the check says of a planted forward; empty if that is right."""
    make, forward = CASES[kind, name]
    model = make()
    result = check_packed(model, lambda rows: forward(model, rows))
    is_right = result.passed == (kind == "right") and ("leak" not in name or result.verdict in ("LEAKS", "failed"))
    return "" if is_right else f"{kind}, {name}: {result}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOME)
def test_some_forwards_are_judged_rightly(name):
    (kind,) = {kind for kind, each in CASES if each == name}
    assert not judged(kind, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_forwards_are_judged_rightly():
    wrongly = [found for case in CASES if (found := judged(*case))]
    assert len(CASES) >= 53
    assert not wrongly, f"{len(CASES) - len(wrongly)} of {len(CASES)} are judged rightly"
