"""Rows alone and rows packed by others, in evaluation and training mode: what `check_packed` compares."""

import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import DataCollatorWithFlattening, PreTrainedModel

from ..core.check.comparison import relative_error, root_mean_square
from ..core.check.gradients import RowsInTraining
from ..core.check.probe import (
    Answers,
    Call,
    Rows,
    RowsAlone,
    Trying,
    Variants,
    check_rows,
    largest_difference,
    log_probs_of,
    rounding_unit,
    row_inputs,
    tried_tokens,
    undisturbed,
)
from ..core.flat.batch import FlatBatch, Inputs
from ..core.model import architecture
from ..core.model.flat_model import FlatModel

# A function that takes rows, each `(n,)` int64, and returns the logits of each, `(n, vocabulary)`
PackedCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# The share of all tokens in the longest document
LONGEST = 0.625
# The most logits that are held at once
LOGITS = 2**29
# Columns of padding added to a row alone to measure rounding: at other widths, kernels choose other tiles
_PADDING = (1, 37)
# Units of float32 by which log-probabilities of long rows may differ beyond the noise: packed rows may go on counting
# positions, and larger rotary angles round more
_ANGLES = 16


def lengths_of(model: PreTrainedModel, documents: int, length: int) -> tuple[int, ...]:
    """Lengths of `documents`, at most `length` in all: the first is short, and the longest is in the middle."""
    if documents < 2 or length < 8 * documents:
        raise ValueError(
            f"`documents={documents}` with `length={length}`: leaks show between two documents or more, of 8 tokens or "
            "more on average. Set `documents` to at least 2, and `length`, the tokens of all, to 8 times as many."
        )
    most = min([length, *(limit - max(_PADDING) for limit in architecture.position_limits(model))])
    longest, shares = min(int(length * LONGEST), most), np.arange(1, documents)
    others = 2 + (length - longest - 2 * (documents - 1)) * shares // shares.sum()
    return tuple(min(n, most) for n in np.insert(others, documents // 2, longest).tolist())


@cache
def trl_collator() -> Callable[[list[dict[str, list[int]]]], Inputs]:
    """TRL's collator of packed rows. Without TRL, or with one that does not import, transformers', which gives them."""
    try:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError:
        return DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return DataCollatorForLanguageModeling(0, padding_free=True)


def as_trl_packs(model: torch.nn.Module, backbone: torch.nn.Module, rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The logits of rows that are computed as one, with the arguments that TRL's packed and padding-free SFT gives."""
    batch = trl_collator()([{"input_ids": row.tolist()} for row in rows])
    del batch["labels"]
    told = {name: x.to(rows[0].device) if torch.is_tensor(x) else x for name, x in batch.items()} | {"use_cache": False}
    calls = []

    def as_trl_calls(*call: Any) -> tuple[tuple[()], Inputs]:
        calls.append(call)
        return (), told

    # TRL's head calls the backbone with all of them; some models' own forward does not pass them on
    with backbone.register_forward_pre_hook(as_trl_calls, with_kwargs=True):
        answer = model(input_ids=told["input_ids"], position_ids=told["position_ids"], use_cache=False)
    if not calls:  # Whisper's calls the decoder within its backbone, and passes on whatever it is given
        answer = model(**told)
    return answer.logits[0].split([*map(len, rows)])


@contextmanager
def as_it_computes(model: PreTrainedModel, call: PackedCall) -> Iterator[str]:
    """
    Within this context, autocast is on if `call` turns it on. Yields why its answers cannot be compared; empty if they
    can.

    Raises:
        `TypeError`: `call` returns something other than tensors.
    """
    device, found = model.device.type, set[torch.dtype]()

    def note(*_):
        if torch.is_autocast_enabled(device):
            found.add(torch.get_autocast_dtype(device))

    tokens = tried_tokens(model)
    rows = [torch.from_numpy(tokens[row]).to(model.device) for row in check_rows(len(tokens), 0)]
    with undisturbed(model), register_module_forward_hook(note):
        try:
            answers = [call(rows), call(rows)]
        except Exception:  # raised again later, where it becomes the verdict
            answers = []
    for each in answers:
        if not isinstance(each, list | tuple) or not all(map(torch.is_tensor, each)):
            raise TypeError(f"`call` returned {type(each).__name__}, not a list with the logits of each row.")
    is_random = any(
        x.shape == y.shape and relative_error(y, x) > rounding_unit(model) ** 0.5
        for x, y in zip(*answers, strict=False)
    )
    said = "the same rows get other answers each time: it draws at random, or keeps something of earlier calls"
    with torch.autocast(device, found.pop()) if found else nullcontext():
        yield said * is_random


def seconds_of_a_token(model: PreTrainedModel, called: Call) -> float:
    """Seconds per token of a row, the best of three runs: others may use the machine, too."""
    length = min([128, *architecture.position_limits(model)])
    inputs = row_inputs(model, [np.arange(length) % model.config.get_text_config().vocab_size])
    with undisturbed(model):
        return min(timeit.repeat(lambda: called(**inputs).log_probs.sum().item(), number=1, repeat=3)) / length


def packed_or_alone(model: Any, call: PackedCall, flat_batch: FlatBatch | None = None, **inputs: Any) -> Any:
    """Stands in for `model` in the check: with a flat batch, `call` computes the rows, otherwise the model does."""
    labels = inputs["labels"]
    if flat_batch is None:
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask", "use_cache")}
        flat = FlatModel.of(model)
        with flat.padded.aside() if flat and flat.padded else nullcontext():
            return SimpleNamespace(log_probs=log_probs_of(model(**arguments).logits, labels))
    rows = [row[mask] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)]
    answers = [*call(rows)]
    if [x.shape[:1] for x in answers] != [row.shape for row in rows]:
        raise ValueError(
            f"the call gave answers of the shapes {[tuple(x.shape) for x in answers]} for rows of the lengths "
            f"{[len(row) for row in rows]}: it has to give `(n, vocabulary)` for each row of `n` tokens"
        )
    return SimpleNamespace(log_probs=log_probs_of(torch.nn.utils.rnn.pad_sequence(answers, batch_first=True), labels))


class LongRows(RowsAlone):
    """[`RowsAlone`] of documents of given lengths."""

    difference = staticmethod(largest_difference)

    def __init__(self, model: PreTrainedModel, called: Call, draw: int, trying: Trying, lengths: Sequence[int]):
        self.model, self.call, self.trying = model, called, trying
        config = model.config.get_text_config()
        self.vocab_size, self.tokens = config.vocab_size, np.arange(config.vocab_size)
        rng = np.random.default_rng(draw)
        self.rows = [rng.integers(0, self.vocab_size, n) for n in lengths]
        # Within a document, tokens by which a call may take it for padding, or for two documents
        longest = max(self.rows, key=len)
        named = (np.atleast_1d(architecture.config_value(config, name)) for name in ("pad_token_id", "eos_token_id"))
        ends = [x for ids in named for x in ids if x in range(self.vocab_size)]
        longest[1 : 1 + len(ends)] = ends
        with self.trying():
            self.alone = self.answers(self.rows)
            padded = [self.answers(self.rows, more) for more in _PADDING]
            self.measure(padded, *self.moved(rng.integers(0, self.vocab_size, 16)))
        self.tolerance += _ANGLES * torch.finfo(torch.float32).eps * root_mean_square(torch.cat(self.alone))

    def answers(self, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> Answers:
        """With `prefix_sharing=None`, each row is computed alone, with `width` columns of padding."""
        if prefix_sharing is not None:
            return super().answers(rows, prefix_sharing=prefix_sharing)
        return [super(LongRows, self).answers([row], len(row) + width)[0] for row in rows]

    def cut(self) -> Iterable[tuple[Rows, Answers]]:
        return ()

    def changed(self) -> Variants:
        return [
            ([self._replaced(row) if i % 2 == kept else row for i, row in enumerate(self.rows)],
             [*range(1 - kept, len(self.rows), 2)])
            for kept in (0, 1)
        ]  # fmt: skip


class PackedInTraining(RowsInTraining):
    """[`RowsInTraining`] for rows packed in any order: the model's input is searched for their tokens."""

    without_limits, differentiates = [], 0  # its rows are as long as is asked for

    @contextmanager
    def watched(self, inputs: Inputs) -> Iterator[list[torch.Tensor]]:
        if "flat_batch" not in inputs:
            with super().watched(inputs) as embedded:
                yield embedded
            return
        n, rows = self.length, [row.tolist() for row in self.rows]
        missing = {*range(len(rows))}
        embeddings: Any = self.model.get_input_embeddings()
        # Zeros that are added to the embeddings, and so have the same gradients; the last is for tokens of no row
        shape = 1, len(rows) * n + 1, embeddings.weight.size(-1)
        added = torch.zeros(shape, dtype=embeddings.weight.dtype, device=inputs["input_ids"].device).requires_grad_()

        def add(module, args, output):
            tokens = args[0].flatten().tolist()
            sources = [-1] * len(tokens)
            for i, row in enumerate(rows):
                for place in range(len(tokens) - n + 1):
                    if tokens[place : place + n] == row:
                        sources[place : place + n] = range(i * n, i * n + n)
                        missing.discard(i)
            return output + added[0, sources].view_as(output)

        with embeddings.register_forward_hook(add):
            yield [added]
        if missing:
            self.unseen = ("gradients at the embeddings were not compared, as these do not get all rows as they are",)
