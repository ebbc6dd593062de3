"""Mistakes that are put into a model, each with what has it act, and where they are caught."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from tests.helpers.tiny import make_model, make_tokenizer
from tests.runs import make_trainer
from trl_paddingfree import UnprovenModelError

BATCH, STEPS = 16, 3


@dataclass
class Call:
    """What a planted mistake sees of a call of the decoder: a single row or a flat one, of `length` tokens."""

    positions: torch.Tensor  # (T,)
    number: int = 0  # of calls before

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def starts(self) -> int:
        """How many rows begin."""
        return int((self.positions == 0).sum())


@dataclass
class Mistake:
    name: str
    acts: Callable[[Call], bool]  # on which flat rows
    lengths: list[int]  # of the rows of the micro-batch that shows it; others are short
    wrong: Callable[[torch.Tensor, Call], torch.Tensor]  # what a layer returns
    shared: int = 0  # tokens that these rows share
    gradients: bool = False  # only in calls with gradients
    before: list[int] = field(default_factory=list)  # lengths of the rows of the micro-batch before that one
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer


def leak(size):
    return lambda states, call: states + size * states.roll(1, 1)


def of_one(reader=None, distance=1):
    """The token at `reader`, by default the one in the middle, sees the one so many tokens before it."""

    def wrong(states, call):
        moved, place = states.clone(), call.length // 2 if reader is None else reader
        moved[:, place] += 0.1 * states[:, place - distance]
        return moved

    return wrong


def misplaced(after):
    """Later rows are computed as if further on."""

    def wrong(states, call):
        late = (call.positions == 0).cumsum(0) > after
        return states * (1 + 0.05 * late[None, :, None].to(states))

    return wrong


def scaled(states, call):
    return 1.05 * states


def detached(states, call):
    return states.detach()


def if_compiled(states, call):
    return 1.05 * states if torch.compiler.is_compiling() else states


# Shown by the second of two micro-batches of as many tokens
KEPT = "angles kept from an earlier flat row as long"
LONG = [120] * BATCH  # about 1,900 tokens
MISTAKES = [
    Mistake("a leak above 1,600 tokens", lambda c: c.length > 1600, LONG, leak(0.1)),
    Mistake("a leak of one token above 1,600 tokens", lambda c: c.length > 1600, LONG, of_one()),
    Mistake("a leak of a thousandth above 1,600 tokens", lambda c: c.length > 1600, LONG, leak(1e-3)),
    Mistake(
        "a leak above 400 tokens, with gradients only", lambda c: c.length > 400, [40] * 16, leak(0.1), gradients=True
    ),
    Mistake("rows after the 14th in other places", lambda c: c.starts > 14, [11 + i for i in range(16)], misplaced(14)),
    Mistake(
        "wrong above 600 tokens of more than 14 rows", lambda c: c.length > 600 and c.starts > 14, [43] * 16, scaled
    ),
    Mistake(
        "a shared prefix of more than 110 tokens", lambda c: c.starts < 14 and c.length > 150, [130] * 16, scaled, 115
    ),
    Mistake("a gradient lost above 1,500 tokens", lambda c: c.length > 1500, LONG, detached, gradients=True),
    Mistake("short rows of equal length", lambda c: c.starts > 10 and c.length == 12 * c.starts, [12] * 16, scaled),
    Mistake("an odd axis above 200 tokens", lambda c: c.length % 2 == 1 and c.length > 200, [20] * 15 + [21], scaled),
    Mistake("multiples of 192", lambda c: c.length % 192 == 0, [24] * 16, scaled),
    Mistake("from the 45th call on", lambda c: c.number > 45 and c.starts > 1, [20] * 16, scaled),
    Mistake(
        "rows of more than 250 tokens", lambda c: c.starts > 1 and c.length > 2 * 250, [260, 250, *[9] * 14], scaled
    ),
    Mistake(
        "a compiled layer above 1,600 tokens",
        lambda c: c.length > 1600,
        LONG,
        if_compiled,
        options={"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    Mistake(
        KEPT, lambda c: c.length > 1600, [150] * 8 + [90] * 8, lambda states, call: states, before=[90] * 8 + [150] * 8
    ),
]


def plant(model, mistake):
    """Have the model make it."""
    state = Call(torch.zeros(0))
    layer = model.base_model.layers[0]
    forward = layer.mlp.forward

    def note(module, args, kwargs):
        positions, embeds = (
            kwargs.get("position_ids"),
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0],
        )
        plain = torch.arange(embeds.size(1))
        state.positions = plain if positions is None or len(positions) > 1 else positions[0]
        state.number += 1

    layer.register_forward_pre_hook(note, with_kwargs=True)

    def wrong(states):
        found = forward(states)
        acts = states.size(0) == 1 and (not mistake.gradients or states.requires_grad) and mistake.acts(state)
        return mistake.wrong(found, state) if acts else found

    layer.mlp.forward = wrong
    if mistake.name == KEPT:
        keep_angles(model.base_model.rotary_emb)
    return model


def keep_angles(rotary):
    """Have cosines and sines come from the first flat row of a length."""
    forward, kept = rotary.forward, {}

    def wrong(states, position_ids):
        found = forward(states, position_ids)
        length = position_ids.size(1)
        return kept.setdefault(length, found) if len(position_ids) == 1 and length > 1600 else found

    rotary.forward = wrong


def data(mistake, shows_at):
    """Micro-batches of short rows, but for the one that shows the mistake."""
    rng, rows = np.random.default_rng(0), []
    for step in range(STEPS):
        shows, is_before = step == shows_at, step == shows_at - 1
        prefix = rng.integers(5, 60, mistake.shared if shows else 0).tolist()
        for i in range(BATCH):
            length = int(rng.integers(4, 9))
            if shows or (is_before and mistake.before):
                length = (mistake.lengths if shows else mistake.before)[i]
            rows.append({"input_ids": prefix + rng.integers(5, 60, length - len(prefix)).tolist()})
    return Dataset.from_list(rows)


def caught(mistake, shows_at, dtype=torch.float32):
    """Where it is caught in a model of this dtype."""
    shows_at = max(shows_at, len(mistake.before) > 0)
    model = plant(make_model(dtype=dtype, max_position_embeddings=4096, num_hidden_layers=2), mistake)
    given = {
        "model": model,
        "processing_class": make_tokenizer(),
        "train_dataset": data(mistake, shows_at),
        "check_steps": 1,
        "max_length": None,
    }
    given |= mistake.options
    given |= {"per_device_train_batch_size": BATCH, "train_sampling_strategy": "sequential", "steps": STEPS}
    try:
        trainer = make_trainer("sft", "shared" if mistake.shared else "flat", **given)
    except UnprovenModelError:
        return "start-up check"
    try:
        trainer.train()
    except UnprovenModelError as error:
        number = str(error).split("before step ")[1].split(",")[0]
        return "first step" if number == "1" else f"step {number}"
    return "not caught"
