"""The memory that training needs: weights, gradients, the optimizer, and what each micro-batch keeps and works with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import upstream
from ..model.forward import is_pooled
from ..model.restored import local_part
from .features import KEYS, PIXELS, SCORED
from .kept_bytes import KeptBytes

logger = logging.get_logger(__name__)

# How many tensors TRL's activation offloading leaves on the device while they are copied to the host
STASHED = 5
# How many tensors of the size of its largest the backward pass of a layer has at a time: gradients of the inputs and
# of the output of one product
WORKING_TENSORS = 3
# Where a layer keeps no copies of keys and values: it makes them again, and gets a gradient of each
COPIES_OF_KEYS = 2
# Bytes per logit besides the logits: without Triton, TRL turns a tile of logits into its gradient with seven more
# tensors at a time, in float32 whatever the model's dtype, and a mask
TORCH_TILE = 7 * 4 + 1
# From so many entries on, every paged optimizer of bitsandbytes pages the state of a tensor
_LARGE = 2**17


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of a head, which works on the hidden states of scored tokens for a time."""

    constant: int = 0  # whatever the batch
    scored: int = 0  # per scored token
    tile: tuple[int, int] = (0, 0)  # per row of the logits, and the most rows at a time
    kept: int = 0  # per scored token, what it keeps for the backward pass and TRL's fused head does not

    def working(self, scored: int, at_once: int | None = None) -> int:
        """Bytes that the head works with for a time, given so many scored tokens, with logits of so many at once."""
        rows = min(scored, at_once or scored, self.tile[1])
        return self.constant + self.scored * scored + self.tile[0] * rows


@dataclass(frozen=True)
class MemoryNeeds:
    """
    How many bytes a micro-batch needs at its peak, by its `features`: all of this arithmetic is here.

    The peak is one of two moments. At the first, the backward pass begins: every layer holds what it keeps, and the LM
    head or the last layer works. At the second, the deepest checkpointed layer has been recomputed: it holds all that
    it computed, and the layers before it their inputs; what the layers after it kept is free by then.

    >>> import numpy as np
    >>> per_token = np.eye(6)[1]
    >>> layers = np.ones((4, 1)) * per_token  # each keeps 10 bytes per token, or its input of 2
    >>> keys = np.array([9]), np.ones((4, 1)), np.array(0)
    >>> kept = KeptBytes(10 * layers, 2 * layers, 1 * per_token, 0 * per_token, *keys, np.array(1))
    >>> needs, five_tokens = MemoryNeeds(100, kept, HeadBytes(constant=15)), 5 * per_token
    >>> needs.peaks(five_tokens).tolist()
    [320, 280, 240, 200, 195]
    >>> needs.fewest_recomputed(five_tokens, 250), needs.fewest_recomputed(five_tokens, 1000)
    ((2, 240), (0, 320))
    >>> needs.offloaded(five_tokens)
    (205, 45)
    """

    fixed: int  # bytes that do not depend on the micro-batch: weights, gradients, state of the optimizer
    per_feature: KeptBytes  # per unit of each feature
    head: HeadBytes = HeadBytes()
    correction: float = 1.0  # a factor for all but `fixed`: measured bytes over predicted ones

    def _working(self, features: np.ndarray) -> Any:
        """What a layer works with in the backward pass of batches, or copies of keys and their gradients if more."""
        of_keys = COPIES_OF_KEYS * self.per_feature.copied * features[..., KEYS]
        return np.maximum(WORKING_TENSORS * (features @ self.per_feature.largest), of_keys)

    def _of_batch(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
        """What each layer keeps, without and with recomputation, what is kept outside, and what a layer works with."""
        kept, recomputed = self.per_feature.kept @ features, self.per_feature.recomputed @ features
        outside = self.per_feature.outside @ features + self.head.kept * features[SCORED]
        return kept, recomputed, outside, self._working(features)

    def saved(self, features: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes kept between the forward and the backward pass, if the first `n` recompute."""
        kept, recomputed, outside, _ = self._of_batch(features)
        before, after = np.cumsum([0, *recomputed]), np.cumsum([0, *kept[::-1]])[::-1]
        return np.rint(self.correction * (before + after + outside)).astype(np.int64)

    def peaks(self, features: np.ndarray) -> np.ndarray:
        """`(layers + 1,)` int64: bytes at the peak of a micro-batch, if the first `n` layers recompute."""
        kept, recomputed, outside, working = self._of_batch(features)
        begin = self.saved(features) + self.correction * max(self.head.working(features[SCORED]), working)
        redone = self.correction * (np.cumsum(recomputed) + np.maximum.accumulate(kept) + working + outside)
        return self.fixed + np.rint(np.maximum(begin, [0, *redone])).astype(np.int64)

    def peaks_of_slices(
        self, slices: np.ndarray, kept_keys: tuple[np.ndarray, np.ndarray], whole: np.ndarray, scored: int | None = None
    ) -> np.ndarray:
        """
        `(slices,)` int64. Entry `n - 1`: bytes at the peak of a batch in slices of which the last `n` keep their
        activations.

        Args:
            slices (`np.ndarray` of shape `(slices, F)`), whole (`np.ndarray` of shape `(F,)`):
                The features of each slice, and of the whole batch.
            kept_keys:
                The keys and values that stay, see [`~trl_paddingfree.flat.slices.kept_keys`].
            scored (`int`, *optional*):
                The most scored tokens that the head gets at a time, by default all.
        """
        layers, working = self.per_feature.kept.sum(0), self._working(slices)
        # The last slice is there as the backward pass of the head begins
        working[-1] = max(working[-1], self.head.working(whole[SCORED], scored))
        _, _, outside, _ = self._of_batch(whole)
        tower = layers[PIXELS] * whole[PIXELS]  # it comes before all slices
        of_keys, (num_kept, before) = self.per_feature.of_keys.sum(0), kept_keys
        stays = 2 * (of_keys @ num_kept + outside)  # with their gradients
        # Where layers keep keys as they are given, these are joined with those of earlier slices
        kept = slices @ layers + of_keys @ before * bool(self.per_feature.copied)
        together = np.cumsum(kept[::-1]) + np.maximum.accumulate(working[::-1])
        needed = np.maximum((kept + working).max(), together) + stays + tower
        return self.fixed + np.rint(self.correction * needed).astype(np.int64)

    def offloaded(self, features: np.ndarray) -> tuple[int, int]:
        """Bytes at the peak, and bytes on the host, if every layer recomputes and its input waits on the host."""
        kept, recomputed, outside, working = self._of_batch(features)
        working = max(self.head.working(features[SCORED]), kept.max() + working)
        on_device = outside + STASHED * recomputed.max() + working
        host = recomputed.sum() + outside  # moved too, but used right after the last layer
        return self.fixed + round(self.correction * on_device), round(self.correction * host)

    def fewest_recomputed(self, features: np.ndarray, budget: int) -> tuple[int, int]:
        """
        The fewest layers that must recompute for a micro-batch to fit, or if it never does, those with which it needs
        least; and the bytes at its peak then.
        """
        peaks = self.peaks(features)
        number = int((peaks <= budget).argmax() if peaks.min() <= budget else peaks.argmin())
        return number, int(peaks[number])


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
