"""Random rows to try a model on, its answers to each row alone, and the tolerances for differences from these."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .. import upstream
from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..model.architecture import classifies_rows, config_value
from ..model.forward import is_pooled
from ..model.mixers import mixers, rounded_otherwise
from ..model.restored import attributes_set, local_part, random_state_restored
from .comparison import HALF_DIGITS_FACTOR, NOISE_FACTOR, Tried, root_mean_square

# The most that a row may move when other rows change, relative to the effect of its own context
LEAK_FRACTION = 0.1
# Length of the prefix that long rows share, relative to a row
SHARED = 0.75
# Of the long rows, those that continue the prefix of an earlier one
CONTINUED = {1: 0, 3: 0, 4: 2}
# Length to which two short rows are cut
_EQUAL = 12
# How many tokens replace the first of a row in turn, to measure the effect of context: a single one may have the same
# embedding, if both were added to the vocabulary and are not trained yet
_STAND_INS = 8
# Rounding unit of float32 products with TF32 on, which keep 10 bits
_TF32 = 2.0**-10
# Attributes of layers and configurations that limit how far a token sees, and their value during the check: exceeding
# the limits of real models would take rows of thousands of tokens
LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale", "keep_window_size", "index_topk")
_NARROW = 8
# Placeholders for images and the like, as configurations name them
_PLACEHOLDERS = ("image_token_id", "audio_token_id", "video_token_id")

Call = Callable[..., Any]
Trying = Callable[[], AbstractContextManager[None]]
Rows = Sequence[Any]  # arrays of token ids, or names of examples with images
Answers = list[torch.Tensor]  # to each row
Variants = list[tuple[Rows, list[int]]]  # with the indices of the rows that stay as they are


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Modes and the random state are restored afterwards."""
    known = mixers()
    modes = ((x, "training", upstream.spoilt_by_evaluation(x) or known.trains(x)) for x in model.modules())
    with attributes_set(modes), random_state_restored(model), torch.no_grad():
        yield


def set_where(
    modules: Iterable[torch.nn.Module],
    is_meant: Callable[[object, str, object], bool],
    value: Callable[[object], float],
) -> AbstractContextManager[None]:
    """
    Within this context, attributes of modules and of their configurations are set to `value(x)`, where `x` is what
    they hold: those for which `is_meant(holder, name, x)` is true.
    """
    modules = [*modules]
    configs = [each for config in upstream.configs_of(modules) for each in (config, config.get_text_config())]
    holders = {id(holder): holder for holder in (*configs, *modules)}.values()
    return attributes_set(
        (holder, name, value(x)) for holder in holders for name, x in vars(holder).items() if is_meant(holder, name, x)
    )


def narrowed(model: torch.nn.Module) -> AbstractContextManager[None]:
    """
    Within this context, sliding windows and chunks are shorter than the rows that are tried. Different ones stay so:
    what attention reads from a layer may no longer be what masks read from the configuration.
    """

    def is_wide(holder, name, value):
        if not isinstance(value, int) or value <= _NARROW:
            return False
        return name in (*LIMITS, *map(getattr(holder, "attribute_map", {}).get, LIMITS))  # a configuration has aliases

    widths = dict[object, int]()
    return set_where(model.modules(), is_wide, lambda x: _NARROW + widths.setdefault(x, len(widths)))


@contextmanager
def as_tried(model: torch.nn.Module) -> Iterator[None]:
    """[`undisturbed`] and [`narrowed`]."""
    with undisturbed(model), narrowed(model):
        yield


def tried_tokens(model: PreTrainedModel) -> np.ndarray:
    """
    The ids that rows are drawn from. Not the padding token, whose embedding is zero in many models: norms amplify its
    gradient, and the rounding in it. Nor placeholders for images and the like, which a model may replace before it
    embeds tokens, nor tokens whose embeddings hold NaN or infinity: data may never use these.
    """
    embeddings: Any = model.get_input_embeddings()
    unlike = [vars(x).get("padding_idx") for x in embeddings.modules()]
    unlike += [config_value(model.config, name) for name in _PLACEHOLDERS]  # `image_token_index` has an alias
    ids = np.arange(model.config.get_text_config().vocab_size)
    weight = getattr(embeddings, "weight", None)
    # All processes must draw alike, and see only their own part of a sharded weight
    if torch.is_tensor(weight) and local_part(weight) is weight and weight.ndim == 2 and weight.dtype.itemsize > 1:
        largest = torch.linalg.vector_norm(weight.detach(), torch.inf, dim=1)  # of each token
        unlike += (~largest.isfinite()).nonzero().flatten().tolist()
    kept = ids[~np.isin(ids, [x for x in unlike if x is not None])]
    return kept if len(kept) else ids


def not_finite(model: torch.nn.Module) -> str:
    """The names of parameters that hold NaN or infinity, in words; empty if none does."""
    names = [f"`{name}`" for name, p in model.named_parameters() if not local_part(p.detach()).isfinite().all()]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} hold{'s' * (len(names) == 1)} NaN or infinity" if names else ""


def check_rows(vocab_size: int, draw: int) -> list[np.ndarray]:
    """Five random rows: three of them share a prompt, every length is different, the shortest is two tokens."""
    rng = np.random.default_rng(draw)  # not the global one, whose state belongs to the training

    def tokens(n):
        return rng.integers(0, vocab_size, n)

    prompt = tokens(9)
    first, third, fifth = (np.append(prompt, tokens(n)) for n in (7, 4, 5))
    # Completions differ from their first token on, and so do prompts, even after [`RowsAlone.changed`] replaces tokens
    third[9], fifth[9] = (first[9] + 2) % vocab_size, (first[9] + 4) % vocab_size
    second, fourth = tokens(2), tokens(12)
    second[0], fourth[0] = (first[0] + 2) % vocab_size, (first[0] + 4) % vocab_size
    return [first, second, third, fourth, fifth]


def long_rows(model: PreTrainedModel, length: int, draw: int) -> list[np.ndarray]:
    """
    Five rows of `length` tokens: the second and fourth continue a prefix of the first, the fifth one of the third.
    """
    tokens, shared = tried_tokens(model), int(length * SHARED)
    rows = np.random.default_rng(draw).integers(0, len(tokens), (5, length))
    rows[2][0] = (rows[0][0] + 2) % len(tokens)
    for number, (row, continued) in enumerate(CONTINUED.items()):
        rows[row][:shared] = rows[continued][:shared]
        rows[row][shared] = (rows[continued][shared] + 2 + number) % len(tokens)
    return [*tokens[rows]]


def row_inputs(model: PreTrainedModel, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> Inputs:
    """A model's arguments for rows, padded to at least `width`, with a flat batch unless `prefix_sharing=None`."""
    pooled = is_pooled(model)
    pad_token_id = model.config.get_text_config().pad_token_id if pooled else 0
    if pad_token_id is None and classifies_rows(model):
        raise ValueError(
            f"{type(model).__name__} finds the end of a row by `config.pad_token_id`, and it is not set: set "
            "`model.config.pad_token_id` to the token that pads your rows."
        )
    lengths = [*map(len, rows)]
    input_ids = torch.full((len(rows), max(width, *lengths)), pad_token_id or 0)
    for padded, row in zip(input_ids, rows, strict=True):
        padded[: len(row)] = torch.from_numpy(row)
    attention_mask = (torch.arange(input_ids.size(1)) < torch.tensor(lengths)[:, None]).long()
    labels = input_ids.masked_fill((attention_mask == 0) | pooled, IGNORE_INDEX)  # pooled heads read rows, not tokens
    inputs: Inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if prefix_sharing is not None:
        inputs["flat_batch"] = FlatBatch.from_padded(input_ids, attention_mask, labels, prefix_sharing=prefix_sharing)
    if not pooled:
        inputs |= {"labels": labels, "fused_lm_head": True}
    device = model.get_input_embeddings().weight.device  # type: ignore[union-attr]
    return {name: x.to(device) if hasattr(x, "to") else x for name, x in inputs.items()}


def log_probs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`(R, L-1)` float32: log-probabilities of `labels` by logits `(R, L, vocabulary)`; 0 where a label is -100."""
    targets = labels[:, 1:].to(logits.device)
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(2, targets.clamp(min=0)[..., None]).squeeze(2)
    return log_probs.masked_fill(targets == IGNORE_INDEX, 0.0)


def largest_difference(found: Answers, expected: Answers) -> float:
    """The largest root mean square difference between the answers to a row and those expected, in nats."""
    return max(root_mean_square(a - b) for a, b in zip(found, expected, strict=True) if len(a))


class RowsAlone:
    """
    The reference for answers: those of a model to a few random rows one by one, in evaluation mode, and the tolerances
    for differences from them.

    Args:
        model (`PreTrainedModel`):
            The model, with TRL's fused LM head or a pooled head.
        call (`Callable`, *optional*):
            Called in place of `model`: the same model under a wrapper that gathers its weights.
        draw (`int`, *optional*, defaults to 0):
            Seed of the rows.
        trying (`Callable`, *optional*):
            Returns the context in which the model is tried, by default evaluation mode with narrow windows.
    """

    def __init__(self, model: PreTrainedModel, call: Call | None = None, draw: int = 0, trying: Trying | None = None):
        self.model, self.call = model, model if call is None else call
        self.trying = trying or partial(as_tried, model)
        self.tokens = tried_tokens(model)
        self.vocab_size = len(self.tokens)
        self.rows: Rows = check_rows(self.vocab_size, draw)  # as indices into `tokens`
        with self.trying():
            self.alone = [self.answers([row])[0] for row in self.rows]
            longest = max(map(len, self.rows))
            # At another width, kernels choose other tiles and round differently
            padded = [self.answers(self.rows, width=width) for width in (longest, longest + 5)]
            self.measure(padded, *self.moved(self.rows[3]))

    def moved(self, row: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The answers to a row with its first token replaced in turn, and those to the row itself, as many times."""
        steps = np.arange(1, 1 + _STAND_INS) * self.vocab_size // (_STAND_INS + 1)
        others = [np.append(token, row[1:]) for token in (row[0] + steps) % self.vocab_size]
        return torch.cat(self.answers(others)), self.answers([row])[0].repeat(_STAND_INS)

    def measure(self, padded: list[Answers], moved: torch.Tensor, still: torch.Tensor, units: float = 1.0) -> None:
        """
        Set the tolerances from the noise of `padded` answers to all rows, but to at least `units` of rounding, and from
        the effect of context: how much `moved` answers differ from `still` ones.
        """
        padded = [*padded, *rounded_otherwise(self.model, lambda: self.answers(self.rows))]
        noises = [self.difference(answers, self.alone) for answers in padded]
        # Padded float64 rows may give NaN (Gemma 2's softmax of masked scores in float32), which tells nothing of noise
        self.noise = max(filter(math.isfinite, noises), default=0.0)
        self.effect = root_mean_square(moved - still)
        # The measured noise may be zero by chance, or because padded rows used the same kernels: tolerate at least one
        # unit of rounding, relative to the log-probabilities
        unit = rounding_unit(self.model)
        # A pooled head gives one number per row: with so few, the measured noise may be near zero by chance
        least = unit * root_mean_square(torch.cat(self.alone)) * (NOISE_FACTOR if is_pooled(self.model) else units)
        explained = min(NOISE_FACTOR * self.noise + least, HALF_DIGITS_FACTOR * unit**0.5 * self.effect)
        # If context has almost no effect, half its digits are less than a unit of rounding, which is tolerated
        self.tolerance = max(explained, min(least, LEAK_FRACTION * self.effect))
        # Leaks get no such minimum: when other rows change, shapes stay the same, and so does rounding
        self.leak_tolerance = min(explained, LEAK_FRACTION * self.effect)

    @staticmethod
    def difference(found: Answers, expected: Answers) -> float:
        """The root mean square difference between answers and those expected, in nats."""
        return root_mean_square(torch.cat(found) - torch.cat(expected))

    def answers(self, rows: Rows, width: int = 0, prefix_sharing: bool | None = None) -> Answers:
        """Log-probabilities of each row's tokens but the first, or a pooled head's answers to all its prefixes."""
        rows = [self.tokens[row] for row in rows]
        if is_pooled(self.model):
            prefixes = [row[:end] for row in rows for end in range(1, len(row) + 1)]
            logits = self.call(**row_inputs(self.model, prefixes, width, prefix_sharing)).logits.cpu().double()
            return list(logits.flatten().split([len(row) * logits.size(1) for row in rows]))
        output = self.call(**row_inputs(self.model, rows, width, prefix_sharing)).log_probs.detach().cpu().double()
        return [answers[: len(row) - 1] for answers, row in zip(output, rows, strict=True)]

    def _replaced(self, tokens: np.ndarray) -> np.ndarray:
        return (tokens + 1) % self.vocab_size

    def changed(self) -> Variants:
        """Variants of the rows with other tokens in some of them."""
        a, b, c, d, e = self.rows

        def ending(row):
            return np.append(row[:9], self._replaced(row[9:]))

        return [
            ([a, self._replaced(b), ending(c), d, ending(e)], [0, 3]),
            ([ending(a), self._replaced(b), c, d, e], [2, 3, 4]),
            ([a, b, c, self._replaced(d), e], [0, 1, 2, 4]),
        ]

    @property
    def tried(self) -> Tried | None:
        """The size of a flat batch of these rows."""
        return Tried(len(self.rows), max(map(len, self.rows)), sum(map(len, self.rows)))

    def cut(self) -> Iterable[tuple[Rows, Answers]]:
        """Two rows cut to equal length, and the answers to them: those to the whole rows, as far as they reach."""
        per_token, first = (len(self.alone[0]) // len(self.rows[0]), 0) if is_pooled(self.model) else (1, 1)
        expected = [self.alone[i][: (_EQUAL - first) * per_token] for i in (0, 3)]
        yield [self.rows[i][:_EQUAL] for i in (0, 3)], expected


@contextmanager
def outside_autocast(model: PreTrainedModel) -> Iterator[None]:
    """Within this context, the check computes what is its own: only models compute under autocast."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as contexts:
        for kind in {"cpu", model.device.type, accelerator.type if accelerator else "cpu"}:
            if kind != "meta" and torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype in which the model computes."""
    # FSDP1 may have offloaded the weights, but computes on the accelerator
    for device in (model.device, torch.accelerator.current_accelerator()):
        if device is not None and torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
    if (dtype := upstream.sharded_dtype(model)) is not None:
        return dtype
    return model.dtype if model.dtype.is_floating_point else torch.bfloat16


def rounding_unit(model: PreTrainedModel) -> float:
    """
    The largest relative error of one rounding in the model's arithmetic: in its dtype, in products with TF32, and in
    the dtype of adapters. At least that of float32, in which transformers computes norms and positions of any model.
    """
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    unit = max(torch.finfo(dtype).eps for dtype in {torch.float32, compute_dtype(model), *trained})
    is_tf32 = compute_dtype(model) == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return max(unit, _TF32) if is_tf32 and torch.cuda.is_available() else unit
