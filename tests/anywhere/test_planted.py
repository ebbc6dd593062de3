"""Packed forwards, right ones and wrong ones: does `check_packed` judge each of them rightly?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import pad_sequence

from scripts.packed_table import by_positions
from tests.helpers.architectures import tiny_model
from tests.helpers.tiny import make_model
from trl_paddingfree import check_packed

Forward = Callable[[Any, list[torch.Tensor]], Any]


def alone(model, rows):
    """Each row by itself: right, whatever the model."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]


def lengths(rows):
    return [*map(len, rows)]


def owners(rows):
    return torch.cat([torch.full_like(row, i) for i, row in enumerate(rows)])


def places(rows):
    return torch.cat([torch.arange(len(row)) for row in rows])


def packed(model, rows, mask=lambda blocks, rows: blocks, positions=lambda places: places):
    """All rows as one, with a mask of blocks and positions of each row, or what is made of these."""
    owner = owners(rows)
    causal = mask(owner[:, None] == owner, rows).tril()
    given = {"attention_mask": causal[None, None], "position_ids": positions(places(rows))[None], "use_cache": False}
    return model(input_ids=torch.cat(rows)[None], **given).logits[0].split(lengths(rows))


def masked(change):
    """With a mask of blocks that `change(mask, rows)` spoils."""
    return partial(packed, mask=change)


def placed(change):
    """With positions that `change(positions)` spoils."""
    return partial(packed, positions=change)


def answered(change):
    """With logits that `change(logits)` spoils, of each row."""
    return lambda model, rows: [change(x) for x in packed(model, rows)]


def when(condition, forward):
    """A forward where a condition on model and rows is met, and else a right one."""
    return lambda model, rows: (forward if condition(model, rows) else packed)(model, rows)


leaky = masked(lambda mask, rows: torch.ones_like(mask))


def mixes_in(path, size=1e-2):
    """Rows one by one, of which each gets something of the one before it in a part of the backbone."""

    def forward(model, rows):
        last = []

        def add(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if last:
                moved = hidden + size * last[0].flatten(0, -2).mean(0)
                args, kwargs = ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})
            last[:] = [hidden]
            return args, kwargs

        with model.base_model.get_submodule(path).register_forward_pre_hook(add, with_kwargs=True):
            return alone(model, rows)

    return forward


def with_weight(name, change):
    """With another tensor, equal in value, in the place of a parameter."""

    def forward(model, rows):
        changed = {name: change(model.get_parameter(name))}
        return packed(lambda **given: functional_call(model, changed, (), given), rows)

    return forward


def half(x):
    """The value, and half of its gradient."""
    return (x + x.detach()) / 2


def part_of(weight):
    return torch.where(torch.arange(len(weight))[:, None] % 4 > 0, weight, weight.detach())


def stays_in_training(model, rows):
    model.train()
    return packed(model, rows)


def trains(model, rows):
    before = model.training
    answers = stays_in_training(model, rows)
    model.train(before)
    return answers


def autocast(model, rows):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return packed(model, rows)


def padded(model, rows):
    ids, mask = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
    return [x[: len(row)] for x, row in zip(model(input_ids=ids, attention_mask=mask).logits, rows, strict=True)]


def by_length(model, rows):
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    answers = packed(model, [rows[i] for i in order])
    return [answers[order.index(i)] for i in range(len(rows))]


def in_bins(model, rows):
    """Two documents in each row of a batch."""
    return [x for start in range(0, len(rows), 2) for x in packed(model, rows[start : start + 2])]


def after_others(model, rows):
    """Documents that are not asked for stand between the others."""
    other = torch.arange(7) + 1
    return packed(model, [x for row in rows for x in (row, other)])[::2]


def own_window(size):
    return masked(lambda mask, rows: mask.triu(1 - size))


def keeps_last_call(kept, model, rows):
    before = kept[-1] if kept else rows[-2][:3]  # the first and last of the short rows start alike
    kept[:] = [rows[-1][:3]]
    return [x[len(before) :] for x in alone(model, [torch.cat([before, row]) for row in rows])]


def checkpointed(model, rows):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return packed(model, rows)
    finally:
        model.gradient_checkpointing_disable()


def embedded_in_thirds(model, rows):
    embed = model.get_input_embeddings()
    embedded = lambda ids: torch.cat([*map(embed, ids.chunk(3, 1))], 1)  # noqa: E731
    return packed(lambda input_ids, **given: model(inputs_embeds=embedded(input_ids), **given), rows)


def head_in_parts(change=lambda weight: weight):
    def forward(model, rows):
        hidden = []
        with model.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0])):
            packed(model, rows)
        weight = change(model.lm_head.weight)
        return torch.cat([linear(x, weight) for x in hidden[0][0].split(64)]).split(lengths(rows))

    return forward


def of(model_type="llama", **options):
    """A model of a type with room for the longest documents that are tried."""
    return partial(make_model, model_type, **{"max_position_embeddings": 4096, **options})


tiny, deep, low = of(), of(num_hidden_layers=6), of(dtype=torch.bfloat16)
wide = of(vocab_size=10_000)  # its head is too large to compare whole
dropping = of(attention_dropout=0.2)
windowed, narrow = (of("mistral", sliding_window=size) for size in (512, 100))
gpt2 = partial(tiny_model, "gpt2")

many = lambda model, rows: len(rows) > 4  # noqa: E731
longer = lambda model, rows: sum(lengths(rows)) > 1024  # noqa: E731
in_training = lambda model, rows: model.training  # noqa: E731
with_gradients = lambda model, rows: torch.is_grad_enabled()  # noqa: E731


def last_two(mask, rows):
    """The last two documents see one another."""
    is_last = owners(rows) >= len(rows) - 2
    return mask | is_last & is_last[:, None]


def up_to_eos(mask, rows):
    before = (torch.cat(rows) == 2).cumsum(0)
    return mask & (before[:, None] == before)


def lost_rows(model, rows):
    return [x if i % 2 else x.detach() + 0 * x for i, x in enumerate(packed(model, rows))]


# By verdict, what is planted in which model
PLANTED = {
    "exact": {
        "one by one": (tiny, alone),
        "padded": (tiny, padded),
        "padded in bfloat16": (low, padded),
        "by length": (tiny, by_length),
        "in bins": (tiny, in_bins),
        "others between": (tiny, after_others),
        "positions from 5 on, which rotary ones do not see": (tiny, placed(lambda p: p + 5)),
        "positions that go on, under a mask": (tiny, placed(lambda p: torch.arange(len(p)))),
        "bfloat16": (low, packed),
        "logits in float32 of bfloat16": (low, answered(torch.Tensor.float)),
        "autocast over float32": (tiny, autocast),
        "a window of its own": (windowed, own_window(512)),
        "a window that the model has": (windowed, by_positions),
        "a window of 100 of its own": (narrow, own_window(100)),
        "train() that stays, with dropout": (dropping, stays_in_training),
        "train() with dropout": (dropping, trains),
        "gradient checkpoints": (tiny, checkpointed),
        "head in parts": (tiny, head_in_parts()),
        "embedded in thirds": (tiny, embedded_in_thirds),
        "a placeholder for images among tokens": (partial(tiny_model, "gemma4"), by_positions),
        "layers with state, one by one": (partial(tiny_model, "lfm2"), alone),
        "large weights": (wide, packed),
        "six layers": (deep, packed),
        "all weights frozen": (lambda: make_model().requires_grad_(False), by_positions),
    },
    "LEAKS": {
        "no boundaries": (tiny, leaky),
        "with more than 4 documents": (tiny, when(many, leaky)),
        "with an odd number of documents": (tiny, when(lambda model, rows: len(rows) % 2, leaky)),
        "of one token": (tiny, when(lambda model, rows: 1 in lengths(rows), leaky)),
        "above 1,024 tokens": (tiny, when(longer, leaky)),
        "above 1,024 tokens in training": (tiny, when(in_training, when(longer, leaky))),
        "in bfloat16": (low, leaky),
        "in bfloat16 with many": (low, when(many, leaky)),
        "from position 1,000 on": (tiny, masked(lambda mask, rows: mask | (places(rows) >= 1000)[:, None])),
        "across the last boundary": (tiny, masked(last_two)),
        "boundaries off by one": (tiny, masked(lambda mask, rows: mask.roll((1, 1), (0, 1)))),
        "of the token before": (tiny, masked(lambda mask, rows: mask | torch.ones_like(mask).triu(-1))),
        "between neighbours in pairs": (
            tiny, masked(lambda mask, rows: owners(rows)[:, None] // 2 == owners(rows) // 2)),
        "in training": (tiny, when(in_training, leaky)),
        "where gradients are on": (tiny, when(with_gradients, leaky)),
        "where they are off": (tiny, when(lambda *given: not with_gradients(*given), leaky)),
        **{f"in layer {i}": (deep, mixes_in(f"layers.{i}")) for i in (0, 3)},
        **{f"in layer {i} in training": (deep, when(in_training, mixes_in(f"layers.{i}"))) for i in (1, 2, 4, 5)},
        "a small one": (tiny, mixes_in("layers.0", 1e-4)),
        "a small one in layer 3 with many": (deep, when(many, mixes_in("layers.3", 1e-4))),
        **{f"in the {part} of {name}": (partial(tiny_model, name), mixes_in(f"layers.0.{part}", 1e-3))
           for name, part in (("llama", "self_attn"), ("lfm2", "conv"), ("mamba2", "mixer"),
                              ("gpt_oss", "self_attn.o_proj"), ("mixtral", "mlp.gate"))},
    },
    "INEXACT": {
        "other order": (tiny, lambda model, rows: packed(model, rows)[:: -1 if len({*map(len, rows)}) == 1 else 1]),
        "positions doubled": (tiny, placed(lambda p: 2 * p)),
        "positions doubled with many": (tiny, when(many, placed(lambda p: 2 * p))),
        "positions doubled in training": (tiny, when(in_training, placed(lambda p: 2 * p))),
        "positions that end at 1,023": (tiny, placed(lambda p: p.clamp(max=1023))),
        "positions of GPT-2 that go on": (gpt2, placed(lambda p: torch.arange(len(p)) % 500)),
        "positions of GPT-2 from 1 on": (gpt2, placed(lambda p: p + 1)),
        "a window that is not there": (tiny, own_window(64)),
        "a window of 300 for 512": (windowed, own_window(300)),
        "no window": (windowed, packed),
        "a window that is longer by one": (narrow, own_window(101)),
        "context of 700 tokens": (tiny, own_window(700)),
        "half a gradient": (tiny, answered(half)),
        "no gradient of some rows": (tiny, lost_rows),
        "no gradient": (tiny, answered(torch.Tensor.detach)),
        "no gradient of a norm": (tiny, with_weight("model.norm.weight", torch.Tensor.detach)),
        "logits scaled": (tiny, answered(lambda x: 1.01 * x)),
        "half a gradient of the head": (wide, head_in_parts(half)),
        "no gradient of a part of the head": (wide, head_in_parts(part_of)),
        "half a gradient of a small weight": (tiny, with_weight("model.layers.1.self_attn.k_proj.weight", half)),
        "half a gradient of a layer between": (deep, with_weight("model.layers.3.mlp.down_proj.weight", half)),
        "logits in bfloat16": (tiny, answered(lambda x: x.bfloat16().float())),
        "documents that end with EOS": (wide, masked(up_to_eos)),
        "shifted by one": (tiny, answered(lambda x: torch.cat([x[:1], x[:-1]]))),
    },
    "failed": {
        "an error on longer rows": (partial(tiny_model, "gpt_neo"), by_positions),
        "forgets the last document": (tiny, lambda model, rows: packed(model, rows)[:-1]),
        "leak of the call before": (tiny, partial(keeps_last_call, [])),
        "draws at random": (tiny, answered(lambda x: dropout(x, 0.1))),
    },
}  # fmt: skip


@pytest.mark.drawn(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("verdict", "name"), [(verdict, name) for verdict, each in PLANTED.items() for name in each])
def test_what_is_planted_is_judged_rightly(verdict, name):
    make, forward = PLANTED[verdict][name]
    model = make()
    result = check_packed(model, partial(forward, model))
    assert result.verdict == verdict, result
    assert result.passed == (verdict == "exact")
