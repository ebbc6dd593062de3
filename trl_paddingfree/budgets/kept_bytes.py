"""Bytes that the layers of a model keep for the backward pass, with recomputation and without.

The bytes are counted, not derived: a few short flat batches go through the model as in training, and autograd shows
what each layer saves, with its adapters, 4-bit weights, dtype, attention, experts and state. Kept bytes are modeled as
a linear function of a few `features` of the batch. Attention and recurrences that pad short segments, and experts with
uneven shares of the tokens, keep more than that: a single factor covers the largest excess seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.model import architecture
from ..core.model.flat_model import FlatModel
from ..core.model.forward import is_pooled
from ..core.model.mixers import mixers
from ..core.model.restored import attributes_set, buffers_restored, random_state_restored
from ..core.model.routes import Route
from ..recomputable import checkpointing_layers, recomputable_layers
from ..spans import NO_WINDOW
from .features import ALL_PAIRS, KEYS, PAIRS, SCORED, TOKENS, memory_features
from .keys import keys_noted
from .saved_bytes import SavedBytes

# Lengths of the rows that are counted: multiples of the chunk sizes of recurrent layers
_SHORT, _MIDDLE, _LONG = 64, 128, 448
# Below this share of all bytes, differences come from kernels that round sizes up
_NEGLIGIBLE = 0.002


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that a forward pass keeps for the backward pass, per unit of each of the `F` features, float64."""

    kept: np.ndarray  # (layers, F): what each layer keeps if it does not recompute
    recomputed: np.ndarray  # (layers, F): what it keeps if it does
    outside: np.ndarray  # (F,): what is kept outside of the layers
    largest: np.ndarray  # (F,): the largest tensor that a layer keeps
    windows: np.ndarray  # (W,): the windows of attention, int64
    of_keys: np.ndarray  # (layers, W): bytes of one token's keys and values that each layer reads, by window
    copied: np.ndarray  # (): per key, the copies that a layer works with but does not keep; 0 if it keeps them
    factor: np.ndarray  # (): the largest ratio of counted to predicted bytes, at least 1

    def of(self, layers: Sequence[int]) -> "KeptBytes":
        """The bytes of some of the layers."""
        return replace(self, kept=self.kept[layers], recomputed=self.recomputed[layers], of_keys=self.of_keys[layers])


def _batches(model: PreTrainedModel, route: Route) -> tuple[list[FlatBatch], list[FlatBatch]]:
    """Flat batches that tell features apart without padding, and others with short segments, which pad."""
    rng, size = np.random.default_rng(0), model.config.get_text_config().vocab_size

    def tokens(*lengths):
        return [rng.integers(0, size, length).tolist() for length in lengths]

    # Rows of fewer positions: a prompt and the longest continuation have to fit
    most = min(architecture.position_limits(model), default=_SHORT + _LONG)
    length = min(_LONG, max(most // _SHORT - 1, 3) * _SHORT)
    (prompt, context), (long,) = tokens(_SHORT, length), tokens(length)
    even = [tokens(_SHORT), tokens(_MIDDLE), [long], tokens(_SHORT, _SHORT)]
    even += [[start + row for row in tokens(_SHORT, _SHORT)] for start in (prompt, context)]
    even.append([prompt + row for row in tokens(_SHORT, _MIDDLE, length)])
    odd = [tokens(*range(3, 25)), tokens(_SHORT // 2), tokens(_SHORT + 6), tokens(length + 40)]
    odd.append(tokens(*range(50, 66, 5)))
    odd.append([start + row for start in tokens(*range(4, 30, 3)) for row in tokens(len(start), 5)])
    # As much padding as attention allows: of rows, of queries of branches, of their keys, and of branches of branches
    odd += [tokens(32, *[23] * 20), [prompt + row for row in tokens(16, 16, *[10] * 20)]]
    odd.append([prompt[: _SHORT - i] + row for i in range(0, 33, 2) for row in tokens(16, 16)])
    forks = zip(tokens(33, 45, *[34] * 20), (30, 19, *[10] * 20), tokens(3, *[8] * 21), strict=True)
    odd.append([prompt[:2] + row for first, at, second in forks for row in (first, first[:at] + second)])
    if not mixers().pads(model, route.states):
        odd = []
    flatten = partial(FlatBatch.from_rows, prefix_sharing=route.prefix_sharing)
    unscored = flatten([long], [[IGNORE_INDEX] * _MIDDLE + long[_MIDDLE:]])
    return [*map(flatten, even, even), unscored], [*map(flatten, odd, odd)]


def count_kept_bytes(
    model: PreTrainedModel,
    route: Route,
    call: Callable[..., Any] | None = None,
    device: torch.device | None = None,
    with_images: Sequence[Inputs] = (),
    **arguments: Any,
) -> KeptBytes:
    """
    Count the bytes that each layer of a model keeps. The model has `route` installed, and TRL's fused head. It is left
    as it was, without gradients.

    `call` is called in place of `model`: the same model in a wrapper that gathers its weights. Batches are on `device`,
    by default that of the first weights. `with_images` are arguments of further calls, whose flat batches have images:
    with them, the layers of the vision tower count, too. `arguments` are what else training passes to the model.
    """
    layers = recomputable_layers(model, bool(with_images))
    peers = FlatModel.peers_of(model)
    even, odd = _batches(model, route)
    features, counts = [], []
    recomputing = [(x, "gradient_checkpointing", False) for layer in layers for x in checkpointing_layers(layer)]
    with (
        attributes_set([*((module, "training", True) for module in model.modules()), *recomputing]),
        buffers_restored(model.modules()),
        random_state_restored(model),
        torch.enable_grad(),
        keys_noted(model) as noted,
    ):
        for inputs in [*map(_as_inputs, even), *with_images, *map(_as_inputs, odd)]:
            counter = SavedBytes(model, layers)
            inputs = send_to_device(inputs, device or model.device)
            if is_pooled(model):
                inputs.pop("labels")  # of tokens: the head, which scores rows, would compute a loss from them
            with counter.counting():
                output = (model if call is None else call)(**inputs, fused_lm_head=True, use_cache=False, **arguments)
            batch = inputs["flat_batch"]
            shares, own = peers.shares(batch)
            features.append(memory_features(batch, route, shares[own]))
            sizes = [counter.sizes(layer) for layer in range(-1, len(layers))]
            of_largest = max(sum(sizes[1:], [0]))
            counts.append([*map(sum, sizes), *counter.inputs, of_largest])
            del output
    seen, counted, number = np.array(features), np.array(counts, np.float64), len(layers)
    fitted, fitted_counts = (array[: len(array) - len(odd)] for array in (seen, counted))
    outside = _per_feature(fitted, fitted_counts[:, 0])
    inside = [_per_feature(fitted, column, SCORED) for column in fitted_counts.T[1:]]  # the head is outside
    of_all = np.stack([outside, *inside])
    factor = (_moments(counted, number) / np.maximum(_moments(seen @ of_all.T, number), 1)).max()
    kept, recomputed = of_all[1 : number + 1], of_all[number + 1 : -1]
    # Scores are the largest tensor only in rows longer than these. Masks get no gradient: no working memory
    all_pairs = kept[:, ALL_PAIRS].max()
    largest = _nonnegative(fitted, fitted_counts[:, -1], PAIRS, SCORED, *([] if all_pairs else [ALL_PAIRS]))
    largest[PAIRS] = 0 if route.loaded_with == "sdpa" else kept[:, PAIRS].max()
    largest[ALL_PAIRS] = max(largest[ALL_PAIRS], all_pairs)
    windows = np.unique([NO_WINDOW, *(window for _, window, _ in noted)])
    numbers = {module: i for i, layer in enumerate(layers) for module in layer.modules()}
    of_keys = np.zeros((number, len(windows)))
    for module, window, size in noted:  # attention outside of these layers counts toward the last one
        of_keys[numbers.get(module, -1), np.searchsorted(windows, window)] += size / seen[:, TOKENS].sum()
    # Where layers keep each key once for all segments, next to nothing grows with the keys of each
    copied = np.array(max((size for *_, size in noted), default=0) / seen[:, TOKENS].max())
    copied *= kept[:, KEYS].max() < copied / 2
    return KeptBytes(kept, recomputed, outside, largest, windows, of_keys, copied, np.maximum(factor, 1.0))


def _as_inputs(batch: FlatBatch) -> Inputs:
    """The arguments with which TRL's trainers call the model."""
    input_ids = batch.input_ids[0][batch.row_index]
    labels = torch.full_like(input_ids, IGNORE_INDEX)  # the flat batch says what the head computes
    return {"input_ids": input_ids, "attention_mask": batch.row_mask.long(), "labels": labels, "flat_batch": batch}


def _moments(counts: np.ndarray, number: int) -> np.ndarray:
    """`(2, N)`: bytes that batches keep if no layer recomputes, and if all do, once the largest has recomputed."""
    outside, kept, recomputed = counts[:, 0], counts[:, 1 : number + 1], counts[:, number + 1 : -1]
    return outside + [kept.sum(1), recomputed.sum(1) + kept.max(1)]


def _per_feature(features: np.ndarray, counts: np.ndarray, *without: int) -> np.ndarray:
    """
    `(F,)`: bytes per unit of each feature, 0 for those in `without`, fitted to `features (N, F)` and `counts (N,)`.
    Pairs, whose error would grow with the square of lengths, are used only if that halves the error; all of them, if
    the device's SDPA keeps their scores.
    """
    best, error = np.zeros(0), np.inf
    for unused in ((PAIRS, ALL_PAIRS), (ALL_PAIRS,), (PAIRS,), ()):
        fitted = _nonnegative(features, counts, *unused, *without)
        off = np.abs(features @ fitted - counts).max()
        if not len(best) or error > max(_NEGLIGIBLE * counts.max(), 2 * off):
            best, error = fitted, off
    return best


def _nonnegative(features: np.ndarray, counts: np.ndarray, *without: int) -> np.ndarray:
    """
    Nonnegative least squares of relative errors. More of a feature never makes layers keep less, so features with
    negative coefficients are dropped, the worst first. Features that never differ, such as keys and tokens where
    nothing is shared, get the minimum-norm solution.
    """
    weights = 1 / np.maximum(counts, counts.max() / 1000 + 1)
    scale = np.maximum(features.max(0), 1).astype(np.float64)
    scale[list(without)] = np.inf
    while True:
        solution = np.linalg.lstsq(features * weights[:, None] / scale, counts * weights, rcond=1e-9)[0]
        if solution.min() >= -_NEGLIGIBLE * counts.max():
            return np.maximum(solution, 0) / scale
        scale[solution.argmin()] = np.inf
