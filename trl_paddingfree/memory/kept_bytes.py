"""Bytes that the layers of a model keep for the backward pass, if they recompute and if they do not.

The bytes are counted, not derived: a few short flat batches go through the model as training would send them, and
autograd tells what each layer saves. Adapters, 4-bit weights, dtypes, attention, experts and layers that carry state
are then counted as they are. What is kept is a linear function of a few sizes of the batch. This vector of sizes, in
the order of `LOADS`, is its [`load`].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..flat.calls import AttentionCalls
from ..flat.layout import FlatLayout
from ..flat.segments import Segments
from ..model.architecture import checkpointing_layers, recomputable_layers, recompute_first
from ..model.flat_model import FlatModel, keys_noted
from ..model.masks import ATTENTION_BACKENDS
from ..model.restored import attributes_set, buffers_restored, modes_restored, random_state_restored
from ..model.routes import Route
from ..model.sequence import scored_sizes
from ..model.state_layers import state_layers
from ..model.state_tree import chunk_sizes
from .saved_bytes import SavedBytes

# The entries of a load: 1, tokens, keys of all segments, those of branches (segments that continue others: with a mask,
# attention may repeat their heads), query-key pairs (where attention keeps scores), pairs of branches (whose masks are
# kept, one for each shape), queries and keys that pad short segments; for states along the tree, slots that pad pieces,
# chunks, and pairs within chunks; image features and pixels, pairs of features (whose mask some towers keep), scored
# tokens
_PADDING = ("query_padding", "key_padding", "slot_padding")
LOADS = (
    *("constant", "tokens", "keys", "branch_keys", "pairs", "branches", *_PADDING, "chunks", "chunk_pairs"),
    *("features", "pixels", "feature_pairs", "scored"),
)
OF_IMAGES = ("features", "pixels", "feature_pairs")
# Lengths of the rows that are counted: multiples of the chunks in which layers with a state work
_SHORT, _MIDDLE, _LONG = 64, 128, 192
# How TRL's trainers call the model
_HEAD = {"fused_lm_head": True, "use_cache": False}
# Entries that grow with the square of lengths. Bytes below this share of all are how kernels round sizes up
_GROWING = ("pairs", "branches", "feature_pairs")
_NEGLIGIBLE = 0.002


def load(batch: FlatBatch, route: Route, device: torch.device | None = None, scored: int | None = None) -> np.ndarray:
    """
    `(len(LOADS),)` int64: the sizes of a flat batch that decide how much memory it needs, computed by `route` on
    `device`, or where the batch is. `scored` is how many scored tokens this process computes, by default all.

    >>> batch = FlatBatch.from_rows([[1, 2, 3, 4], [1, 2, 5]], [[-100, -100, 3, 4], [-100, -100, 5]])
    >>> sizes = dict(zip(LOADS, load(batch, Route("segment", "sdpa", True)).tolist()))
    >>> {name: size for name, size in sizes.items() if size}
    {'constant': 1, 'tokens': 6, 'keys': 7, 'branch_keys': 3, 'pairs': 22, 'branches': 6, 'scored': 3}
    """
    segments, tokens, images = batch.layout.segments, batch.counts.computed, batch.images
    features, pixels = (0, 0) if images is None else (images.num_features, images.num_pixels)
    states = chunk_sizes(batch.layout, device or batch.layout.device) if route.states == "tree" else (0, 0, 0)
    if scored is None:
        scored = len(batch.scored)
    last = [*states, features, pixels, features**2, scored]
    if route.backend in ATTENTION_BACKENDS:
        lengths, keys = np.array(segments.lengths), np.array(segments.key_lengths)
        # Layers whose attention no varlen kernel can compute call plain attention
        is_flash = route.backend == "flash"
        sizes = ((lengths * keys).sum(), 0, 0, 0) if is_flash else _pairs_and_padding(batch.layout, tokens)
        return np.array([1, tokens, keys.sum(), keys[keys > lengths].sum(), *sizes, *last])
    return np.array([1, tokens, tokens, 0, tokens**2, 0, 0, 0, *last])


def joined_load(one: np.ndarray, other: np.ndarray, route: Route) -> np.ndarray:
    """The load of a batch with the rows of two others, from the loads of these, which share nothing."""
    both = one + other
    squares = [("feature_pairs", "features")]
    squares += [] if route.backend in ATTENTION_BACKENDS else [("pairs", "tokens")]
    for pairs, single in squares:
        both[LOADS.index(pairs)] = both[LOADS.index(single)] ** 2
    both[LOADS.index("constant")] = 1
    return both


def slice_loads(segments: Segments, cuts: Sequence[int], route: Route, whole: np.ndarray) -> np.ndarray:
    """
    `(slices, len(LOADS))` float64: the load of the decoder in each slice of a batch that is cut at these positions, and
    whose load is `whole`. Padding of short runs is left out, and entries of states are shared out by tokens.

    >>> segments, route = Segments((6, 3), (-1, 0), (0, 3)), Route("segment", "sdpa", True)
    >>> loads = slice_loads(segments, (0, 4, 9), route, np.zeros(len(LOADS)))
    >>> [dict(zip(LOADS, row.tolist()))["keys"] for row in loads]
    [4.0, 12.0]
    """
    offsets = np.array(segments.offsets)
    bounds = np.unique(np.concatenate([offsets, cuts]))
    firsts, lengths = bounds[:-1], np.diff(bounds)
    segment = np.searchsorted(offsets, firsts, "right") - 1  # of each run
    keys = np.array(segments.starts)[segment] + firsts - offsets[segment] + lengths
    is_branch, pairs = keys > lengths, lengths * keys
    branches = pairs * is_branch * (route.backend != "flash")
    number = np.searchsorted(cuts, firsts, "right") - 1
    names = ("tokens", "keys", "branch_keys", "pairs", "branches")
    loads = np.zeros((len(cuts) - 1, len(LOADS)))
    for name, of_run in zip(names, (lengths, keys, keys * is_branch, pairs, branches), strict=True):
        np.add.at(loads[:, LOADS.index(name)], number, of_run)
    loads[:, LOADS.index("constant")] = 1
    states = [LOADS.index(name) for name in ("slot_padding", "chunks", "chunk_pairs")]
    loads[:, states] = whole[states] * (loads[:, 1:2] / max(segments.num_tokens, 1))
    return loads


def _pairs_and_padding(layout: FlatLayout, tokens: int) -> tuple[int, int, int, int]:
    """Sums over all calls of attention: query-key pairs, entries of branches' masks, queries and keys that pad."""
    calls = AttentionCalls.of(layout)
    branches = num_queries = num_keys = 0
    shapes = list(zip(layout.segments.lengths, layout.segments.key_lengths, strict=True))
    for call, queries, keys in zip(calls.segments, calls.queries, calls.keys, strict=True):
        num_queries, num_keys = num_queries + len(call) * queries, num_keys + len(call) * keys
        if keys > queries:
            branches += queries * keys * (1 if len({shapes[i] for i in call}) == 1 else len(call))
    return calls.num_pairs, branches, num_queries - tokens, num_keys - sum(layout.segments.key_lengths)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a forward pass keeps for the backward pass, per unit of each entry of a [`load`], float64."""

    kept: np.ndarray  # (layers, len(LOADS)): what each layer keeps if it does not recompute
    recomputed: np.ndarray  # of the same shape: what it keeps if it does
    largest: np.ndarray  # of the same shape: the largest tensor that it keeps
    outside: np.ndarray  # (len(LOADS),): what is kept outside of the layers
    of_keys: np.ndarray  # (): bytes of the keys and values of one token, in all layers

    def of(self, layers: Sequence[int]) -> "KeptBytes":
        """The bytes of some of the layers."""
        return KeptBytes(self.kept[layers], self.recomputed[layers], self.largest[layers], self.outside, self.of_keys)


def _batches(model: PreTrainedModel, route: Route) -> list[FlatBatch]:
    """Flat batches that tell the entries of a load apart: with rows of other lengths, unscored tokens, prefixes."""
    rng, size = np.random.default_rng(0), model.config.get_text_config().vocab_size

    def tokens(number: int) -> list[int]:
        return rng.integers(0, size, number).tolist()

    prompt, context = tokens(_SHORT), tokens(_LONG)
    batches = [[tokens(_SHORT)], [tokens(_MIDDLE)], [tokens(_LONG)], [tokens(_SHORT), tokens(_SHORT)]]
    batches += [[shared + tokens(_SHORT), shared + tokens(_SHORT)] for shared in (prompt, context)]
    batches.append([prompt + tokens(_SHORT), prompt + tokens(_MIDDLE), prompt + tokens(_LONG)])
    if route.states == "tree":  # chunks of other lengths, and pieces of about one length
        batches += [[tokens(_SHORT // 2)], [tokens(_SHORT + 6)], [tokens(_LONG + 40)]]
        batches += [[tokens(_SHORT), tokens(_SHORT - 8), tokens(_SHORT - 12)]]
    if route.backend in ("segment", "varlen") and (route.states == "tree" or not state_layers(model)):  # rows pad, too
        # Short segments, which are computed together: queries and keys are padded, or keys alone
        batches.append([prompt + tokens(_SHORT - i) for i in range(8)])
        batches.append([prompt, *(prompt[: _SHORT - i] + tokens(_SHORT) for i in range(1, 9))])
    flat = [FlatBatch.from_rows(rows, rows, prefix_sharing=route.prefix_sharing) for rows in batches]
    unscored = [IGNORE_INDEX] * _MIDDLE + batches[2][0][_MIDDLE:]
    return [*flat, FlatBatch.from_rows(batches[2], [unscored], prefix_sharing=route.prefix_sharing)]


def count_kept_bytes(
    model: PreTrainedModel,
    route: Route,
    call: Callable[..., Any] | None = None,
    device: torch.device | None = None,
    with_images: Sequence[Inputs] = (),
    **arguments: Any,
) -> KeptBytes:
    """
    Count the bytes that each layer of a model keeps, on which `route` is installed and whose head is TRL's fused one.
    Leaves no gradient, and the model as it was.

    `call` is called in place of `model`: the same under a wrapper that gathers its weights. Batches are on `device`, or
    where the first weights are. `with_images` are arguments of further calls, whose flat batches have images: with
    them, the layers of the vision tower count. `arguments` are what else training gives the model.
    """
    layers = recomputable_layers(model, bool(with_images))
    if device is None:
        device = next(model.parameters()).device
    loads, inside, outside = [], [], []
    with _as_in_training(model, layers), keys_noted(model) as of_keys:
        for inputs in [*map(_as_inputs, _batches(model, route)), *with_images]:
            counter = SavedBytes(model, layers)
            inputs = send_to_device(inputs, device)
            with counter.counting():
                output = (model if call is None else call)(**inputs, **_HEAD, **arguments)
            group, batch = FlatModel.group_of(model), inputs["flat_batch"]
            scored = None if group is None else scored_sizes(batch, group.size)[group.rank]
            loads.append(load(batch, route, scored=scored))
            totals, peaks = zip(*((counter.total(i), counter.largest(i)) for i in range(len(layers))), strict=True)
            inside.append([totals, counter.inputs, peaks])
            outside.append(counter.total(-1))
            del output
    sizes, counts = np.array(loads), np.array(inside)
    # A mask over all patches of all images is made once, outside of the tower's layers
    growing = ("pairs", "branches")
    kept, recomputed = np.moveaxis(_per_load(sizes, counts, growing), 0, -1)[:2]
    # The largest tensor is no sum over entries: that of padded segments would be taken for that of all tokens
    is_padded, has_images = (sizes[:, list(map(LOADS.index, names))].any(1) for names in (_PADDING, ["features"]))
    is_usable = ~is_padded | has_images
    largest = _per_load(sizes[is_usable], counts[is_usable, 2], growing).T
    per_token = np.array(sum(of_keys) / max(sizes[:, LOADS.index("tokens")].sum(), 1))
    return KeptBytes(kept, recomputed, largest, _per_load(sizes, np.array(outside), _GROWING), per_token)


def _as_inputs(batch: FlatBatch) -> Inputs:
    """The arguments with which TRL's trainers call the model."""
    input_ids = batch.input_ids[0][batch.row_index]
    labels = torch.full_like(input_ids, IGNORE_INDEX)  # the flat batch says what the head computes
    return {"input_ids": input_ids, "attention_mask": batch.row_mask.long(), "labels": labels, "flat_batch": batch}


def _per_load(loads: np.ndarray, counts: np.ndarray, growing: Sequence[str]) -> np.ndarray:
    """
    Bytes per unit of each entry: the least squares of `loads (N, F)` and `counts (N, ...)`, of shape `(F, ...)`.

    Entries that never differ, such as keys and tokens where nothing is shared, get the solution of least norm. Of those
    in `_GROWING`, whose errors would grow in longer rows, only `growing` are fitted, and they are only kept if they
    halve the error that is left without them.
    """
    flat = counts.reshape(len(counts), -1).astype(np.float64)
    scale = np.maximum(loads.max(0), 1).astype(np.float64)

    def fit(left_out: Sequence[str]) -> np.ndarray:
        solutions = []
        for column in flat.T:
            divisor = scale.copy()
            divisor[[LOADS.index(name) for name in left_out]] = np.inf
            while True:
                solution = np.linalg.lstsq(loads / divisor, column, rcond=1e-9)[0]
                # More of something never makes layers keep less: negative entries are left out, the worst first
                worst = solution.argmin()
                if solution[worst] >= -_NEGLIGIBLE * column.max():
                    break
                divisor[worst] = np.inf
            solutions.append(np.maximum(solution, 0) / divisor)
        return np.stack(solutions, axis=1)

    plain, full = fit(_GROWING), fit([name for name in _GROWING if name not in growing])
    plain_error, full_error = (np.abs(loads @ per_load - flat).max(0) for per_load in (plain, full))
    grows = (plain_error > _NEGLIGIBLE * np.maximum(flat.max(0), 1)) & (full_error < plain_error / 2)
    result = np.where(grows, full, plain)
    return result.reshape(loads.shape[1], *counts.shape[1:])


@contextmanager
def _as_in_training(model: PreTrainedModel, layers: Sequence[GradientCheckpointingLayer]) -> Iterator[None]:
    """Training mode with gradients, nothing recomputed. Afterwards all that this changes is as before."""
    flags = [(layer, "gradient_checkpointing", layer.gradient_checkpointing) for layer in checkpointing_layers(model)]
    with (
        modes_restored(model.modules()),
        attributes_set(flags),
        buffers_restored(model.modules()),
        random_state_restored(model),
        torch.enable_grad(),
    ):
        model.train()
        recompute_first(layers, 0)
        yield
