"""The memory that training needs: weights, gradients, the optimizer, and what each micro-batch keeps and works with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import upstream
from ..model.forward import is_pooled
from ..model.restored import local_part
from .kept_bytes import LOADS, OF_IMAGES, KeptBytes

logger = logging.get_logger(__name__)

# Where the search for the most tokens that fit ends: no device fits so many
MOST_TOKENS = 2**30
# How many tensors TRL's activation offloading leaves on the device while they are copied to the host
STASHED = 5
# How many tensors of the size of its largest the backward pass of a layer has at a time: gradients of the inputs and
# of the output of one product
WORKING_TENSORS = 3
# Bytes per logit besides the logits: without Triton, TRL turns a tile of logits into its gradient with seven more
# tensors at a time, in float32 whatever the model's dtype, and a mask
TORCH_TILE = 7 * 4 + 1
# From so many entries on, every paged optimizer of bitsandbytes pages the state of a tensor
_LARGE = 2**17


@dataclass(frozen=True)
class MemoryNeeds:
    """
    How many bytes a micro-batch needs at its peak, by its load (see `kept_bytes`): all of this arithmetic is here.

    The peak is one of two moments. When the backward pass begins, every layer holds what it keeps, and the LM head or
    the last layer works. When the last of the recomputing layers has recomputed, it holds all that it computed, and
    the layers before it their inputs; what the layers after it kept is free by then.

    >>> layers = 4  # each keeps 10 bytes per token, or its input of 2
    >>> needs = MemoryNeeds(100, [[10]] * layers, [[2]] * layers, [1], [3], (1, 2), [4])
    >>> needs.peaks(np.array([5])).tolist()
    [325, 285, 245, 205, 215]
    >>> needs.fewest_recomputed(np.array([5]), 250), needs.fewest_recomputed(np.array([5]), 1000)
    ((2, 245), (0, 325))
    >>> needs.offloaded(np.array([5]))
    (225, 45)
    """

    fixed: int  # bytes that do not depend on the micro-batch: weights, gradients, state of the optimizer
    kept: ArrayLike  # (layers, loads): bytes saved per unit of each load by a layer that does not recompute
    recomputed: ArrayLike  # the same, if it does
    outside: ArrayLike  # (loads,): the same, of what lies outside of the layers
    head: ArrayLike  # (loads,): of what the LM head works with for a time
    tile: tuple[int, int]  # bytes per row of logits (one for each scored token, the last entry); most rows at a time
    working: ArrayLike  # (loads,): of what the backward pass of one layer works with for a time
    of_keys: float = 0.0  # bytes of the keys and values of one token, which slices keep for later ones
    correction: float = 1.0  # a factor for all but `fixed`: measured bytes over predicted ones

    def saved(self, load: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes kept between the forward and the backward pass, if the first `n` recompute."""
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        before, after = np.cumsum([0, *recomputed]), np.cumsum([0, *kept[::-1]])[::-1]
        return np.rint(self.correction * (before + after + np.dot(self.outside, load))).astype(np.int64)

    def _head(self, load: np.ndarray, scored: int | None = None) -> float:
        """Bytes that the LM head works with for a time, given `scored` tokens at once, or all."""
        return np.dot(self.head, load) + self.tile[0] * min(load[-1] if scored is None else scored, self.tile[1])

    def peaks(self, load: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes at the peak of a micro-batch, if the first `n` layers recompute."""
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        working, outside = np.dot(self.working, load), np.dot(self.outside, load)
        begin = self.saved(load) + self.correction * max(self._head(load), working)
        redone = self.correction * (np.cumsum(recomputed) + np.maximum.accumulate(kept) + working + outside)
        return self.fixed + np.rint(np.maximum(begin, [0, *redone])).astype(np.int64)

    def peak_of_slices(self, slices: np.ndarray, num_kept: int, whole: np.ndarray, scored: int | None = None) -> int:
        """
        Bytes at the peak of a batch in slices, by the `(slices, loads)` of each and that of the `whole`: one slice with
        all that its layers keep, and the keys and values of `num_kept` tokens, with their gradients. The head gets so
        many `scored` tokens at a time, by default all.
        """
        layers, working = np.asarray(self.kept).sum(0), np.dot(slices, self.working)
        # The last slice is there as the backward pass of the head begins
        working[-1] = max(working[-1], self._head(whole, scored))
        of_images = np.array([name in OF_IMAGES for name in LOADS[: len(whole)]])  # the tower comes before all slices
        outside = np.dot(self.outside, whole) + np.dot(layers, whole * of_images)
        bytes_needed = (slices @ layers + working).max() + 2 * self.of_keys * num_kept + outside
        return self.fixed + round(self.correction * bytes_needed)

    def offloaded(self, load: np.ndarray) -> tuple[int, int]:
        """Bytes at the peak, and bytes on the host, if every layer recomputes and its input waits on the host."""
        kept, recomputed = (np.asarray(layers) @ np.asarray(load) for layers in (self.kept, self.recomputed))
        working, outside = np.dot(self.working, load), np.dot(self.outside, load)
        on_device = outside + STASHED * recomputed.max() + max(self._head(load), kept.max() + working)
        host = self.correction * (recomputed.sum() + outside)  # moved too, but used right after the last layer
        return self.fixed + round(self.correction * on_device), round(host)

    def fewest_recomputed(self, load: np.ndarray, budget: int) -> tuple[int, int]:
        """
        The fewest layers that must recompute for a micro-batch to fit, or if it never does, those with which it needs
        least; and the bytes at its peak then.
        """
        peaks = self.peaks(load)
        number = int((peaks <= budget).argmax() if peaks.min() <= budget else peaks.argmin())
        return number, int(peaks[number])

    def most_tokens(self, load_of: Callable[[int], np.ndarray], budget: int, number: int | None = None) -> int:
        """The most tokens that fit, 0 if none do, loaded by `load_of`, if `number` layers recompute (default: any)."""

        def fits(tokens: int) -> bool:
            peaks = self.peaks(load_of(tokens))
            return (peaks.min() if number is None else peaks[number]) <= budget

        low, high = 0, 1
        while high < MOST_TOKENS and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct storages on this device: of a sharded tensor its own part."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        own = local_part(tensor)
        own = vars(own).get("ds_tensor", own)  # ZeRO-3
        storages[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
    return sum(storages.values())


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a model, with the scales of 4-bit weights."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        if (quantized := vars(parameter).get("quant_state")) is not None:
            tensors += [x for x in quantized.as_dict().values() if isinstance(x, torch.Tensor)]
    return tensors


def optimizer_bytes(optimizer: type, options: dict[str, Any], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of the state that an optimizer of a class will have for `parameters`, scaled up from that of a sample."""
    total = 0.0
    for dtype, is_large in {(parameter.dtype, parameter.numel() >= _LARGE) for parameter in parameters}:
        alike = [p for p in parameters if (p.dtype, p.numel() >= _LARGE) == (dtype, is_large)]
        rows = _LARGE // 128 if is_large else 128
        sample = torch.nn.Parameter(torch.zeros(rows, 128, dtype=dtype, device=alike[0].device))
        sample.grad = torch.zeros_like(sample)
        try:
            made = optimizer([sample], **options)
            made.step()
            state = [x for x in made.state[sample].values() if isinstance(x, torch.Tensor)]
            # Paged state moves to the host when anything else needs memory
            per_byte = tensor_bytes(x for x in state if not vars(x).get("is_paged")) / tensor_bytes([sample])
        except Exception as error:  # one that needs the whole model: taken for Adam, whose state is the largest
            logger.warning(f"{optimizer.__name__} says nothing of its state, which is taken for Adam's: {error}")
            per_byte = 2.0
        total += per_byte * tensor_bytes(alike)
    return round(total)


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of a head, which works on the hidden states of scored tokens for a time."""

    constant: int = 0  # whatever the batch
    scored: int = 0  # per scored token
    tile: tuple[int, int] = (0, 0)  # per row of the logits, and the most rows at a time
    kept: int = 0  # per scored token, what it keeps for the backward pass and TRL's fused head does not


def fused_head(model: PreTrainedModel, *others: PreTrainedModel) -> HeadBytes:
    """
    Bytes of TRL's head on the first of models, which is trained. The fused LM head works in tiles, and adds gradients
    up in float32; a pooled head, with one value per row, needs nothing to speak of.
    """
    if is_pooled(model):
        return HeadBytes()
    head, config = model.get_output_embeddings().weight, model.config.get_text_config()
    rows, columns = upstream.lm_head_tile()
    # TRL computes in the dtype of autocast, which is not wider than this
    per_row = columns * model.dtype.itemsize
    if not upstream.has_head_kernel(head.device):
        per_row += TORCH_TILE * min(columns, config.vocab_size)
    return HeadBytes(4 * head.numel() * head.requires_grad, 4 * config.hidden_size, (per_row, rows))


def needs_of(kept: KeptBytes, fixed: int, head: HeadBytes) -> MemoryNeeds:
    """What micro-batches of a model need, from what its layers keep, and from its head."""
    constant, scored = np.eye(len(LOADS))[[LOADS.index("constant"), LOADS.index("scored")]]
    of_head, outside = head.constant * constant + head.scored * scored, kept.outside + head.kept * scored
    working = WORKING_TENSORS * kept.largest.max(0)
    return MemoryNeeds(fixed, kept.kept, kept.recomputed, outside, of_head, head.tile, working, float(kept.of_keys))


def fixed_bytes(
    models: Sequence[torch.nn.Module], optimizer: tuple[type, dict[str, Any]], held: int = 0, shards: int = 1
) -> int:
    """
    Bytes of the weights of all models, or those `held` before training if other tensors make that more; of gradients,
    and of optimizer state, for what is trained of the first model. Each process has one of `shards` parts of the state.
    """
    trained = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
    loaded = tensor_bytes(tensor for model in models for tensor in weights(model))
    return max(loaded, held) + tensor_bytes(trained) + optimizer_bytes(*optimizer, trained) // shards
