"""The memory that training needs: weights, gradients, optimizer state, and what micro-batches keep and work with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..core import upstream
from ..core.model.forward import is_pooled
from ..core.model.restored import local_part
from .features import KEYS, PIXELS, SCORED
from .kept_bytes import KeptBytes

logger = logging.get_logger(__name__)

# How many tensors TRL's activation offloading leaves on the device while they are copied to the host
STASHED = 5
# How many tensors as large as its largest the backward pass of a layer holds at a time: gradients of the inputs and of
# the output of one matrix product
WORKING_TENSORS = 3
# If a layer keeps no copies of keys and values: the copies, made again, and a gradient of each
COPIES_OF_KEYS = 2
# Bytes per logit besides the logits: without Triton, TRL computes the gradient of a tile of logits with seven more
# tensors at a time, in float32 whatever the model's dtype, and a mask
TORCH_TILE = 7 * 4 + 1
# From this many elements on, every paged optimizer of bitsandbytes pages the state of a tensor
_LARGE = 2**17


@dataclass(frozen=True)
class HeadBytes:
    """Bytes that a head takes for the hidden states of scored tokens."""

    constant: int = 0  # independent of the batch
    scored: int = 0  # per scored token
    tile: tuple[int, int] = (0, 0)  # per row of logits, and the most rows at a time
    kept: int = 0  # per scored token, what it keeps for the backward pass beyond TRL's fused head
    in_chunks: bool = True  # whether it gets the scored tokens in the chunks of a schedule

    def working(self, scored: int, at_once: int | None = None) -> int:
        """Temporary bytes of the head for `scored` tokens, with logits of `at_once` of them at a time."""
        rows = min(scored, self.in_chunks and at_once or scored, self.tile[1])
        return self.constant + self.scored * scored + self.tile[0] * rows


@dataclass(frozen=True)
class MemoryNeeds:
    """
    Predicts how many bytes a micro-batch needs at its peak, from its `features`: all of this arithmetic is here.

    The peak comes at one of two moments. At the first, the backward pass begins: every layer holds what it keeps, and
    the LM head or the last layer works. At the second, the deepest checkpointed layer has been recomputed: it holds all
    that it computed, and the layers before it their inputs; what the layers after it kept is free by then.

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

    fixed: int  # bytes that do not depend on the micro-batch: weights, gradients, optimizer state
    per_feature: KeptBytes  # per unit of each feature
    head: HeadBytes = HeadBytes()
    correction: float = 1.0  # a factor for all but `fixed`: the ratio of measured to predicted bytes
    padding: float = 1.0  # what part of it short segments make up, which layers pad, and the head does not

    def _working(self, features: np.ndarray) -> Any:
        """Working bytes of a layer in the backward pass, or of copied keys and their gradients if those are more."""
        of_keys = COPIES_OF_KEYS * self.per_feature.copied * features[..., KEYS]
        return np.maximum(WORKING_TENSORS * (features @ self.per_feature.largest), of_keys)

    def _head(self, scored: int, at_once: int | None = None) -> float:
        """Working bytes of the head, like others before the correction, which must not make them fewer."""
        return self.head.working(scored, at_once) / min(self.padding, self.correction)

    def _of_batch(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
        """Bytes kept by each layer, without and with recomputation; bytes kept outside; working bytes of a layer."""
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
        begin = self.saved(features) + self.correction * max(self._head(features[SCORED]), working)
        redone = self.correction * (np.cumsum(recomputed) + np.maximum.accumulate(kept) + working + outside)
        return self.fixed + np.rint(np.maximum(begin, [0, *redone])).astype(np.int64)

    def peaks_of_slices(
        self, slices: np.ndarray, kept_keys: tuple[np.ndarray, np.ndarray], whole: np.ndarray, scored: int | None = None
    ) -> np.ndarray:
        """
        `(slices,)` int64. Entry `n - 1`: bytes at the peak of a batch in slices, if the last `n` slices keep their
        activations.

        Args:
            slices (`np.ndarray` of shape `(slices, F)`), whole (`np.ndarray` of shape `(F,)`):
                The features of each slice, and of the whole batch.
            kept_keys:
                The keys and values that stay, see [`~trl_paddingfree.slices.axis.kept_keys`].
            scored (`int`, *optional*):
                The most scored tokens that the head gets at a time, by default all.
        """
        layers, working = self.per_feature.kept.sum(0), self._working(slices)
        # The last slice is still there when the backward pass of the head begins
        working[-1] = max(working[-1], self._head(whole[SCORED], scored))
        _, _, outside, _ = self._of_batch(whole)
        tower = layers[PIXELS] * whole[PIXELS]  # it runs before all slices
        of_keys, (num_kept, before) = self.per_feature.of_keys.sum(0), kept_keys
        stays = 2 * (of_keys @ num_kept + outside)  # with their gradients
        # Layers that keep keys as they are given keep them joined with those of earlier slices
        kept = slices @ layers + of_keys @ before * bool(self.per_feature.copied)
        together = np.cumsum(kept[::-1]) + np.maximum.accumulate(working[::-1])
        needed = np.maximum((kept + working).max(), together) + stays + tower
        return self.fixed + np.rint(self.correction * needed).astype(np.int64)

    def offloaded(self, features: np.ndarray) -> tuple[int, int]:
        """Bytes at the peak, and bytes on the host, if every layer recomputes and its input is offloaded."""
        kept, recomputed, outside, working = self._of_batch(features)
        working = max(self._head(features[SCORED]), kept.max() + working)
        on_device = outside + STASHED * recomputed.max() + working
        host = recomputed.sum() + outside  # offloaded, too, but used right after the last layer
        return self.fixed + round(self.correction * on_device), round(self.correction * host)

    def fewest_recomputed(self, features: np.ndarray, budget: int) -> tuple[int, int]:
        """
        The fewest layers that must recompute for a micro-batch to fit or, if it never does, the number with which it
        needs least; and the bytes at its peak then.
        """
        peaks = self.peaks(features)
        number = int((peaks <= budget).argmax() if peaks.min() <= budget else peaks.argmin())
        return number, int(peaks[number])


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct storages: of a sharded tensor, the local shard."""
    storages = {}
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
            tensors += [x for x in quantized.as_dict().values() if torch.is_tensor(x)]
    return tensors


def optimizer_bytes(optimizer: type, options: dict[str, Any], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of the state that an optimizer will have for `parameters`, scaled up from that of a small sample."""
    total = 0.0
    for dtype, is_large in {(parameter.dtype, parameter.numel() >= _LARGE) for parameter in parameters}:
        alike = [p for p in parameters if (p.dtype, p.numel() >= _LARGE) == (dtype, is_large)]
        rows = _LARGE // 128 if is_large else 128
        sample = torch.nn.Parameter(torch.zeros(rows, 128, dtype=dtype, device=alike[0].device))
        sample.grad = torch.zeros_like(sample)
        try:
            made = optimizer([sample], **options)
            made.step()
            # Paged state moves to the host when anything else needs memory
            state = [x for x in made.state[sample].values() if torch.is_tensor(x) and not vars(x).get("is_paged")]
            per_byte = tensor_bytes(state) / tensor_bytes([sample])
        except Exception as error:  # it may need the whole model: assume Adam, whose state is the largest
            logger.warning(f"{optimizer.__name__} does not say how large its state is, which counts as Adam's: {error}")
            per_byte = 2.0
        total += per_byte * tensor_bytes(alike)
    return round(total)


def fused_head(model: PreTrainedModel, *others: PreTrainedModel) -> HeadBytes:
    """
    Bytes of TRL's head on the trained `model`. The fused LM head works in tiles, and adds gradients up in float32; a
    pooled head, with one value per row, needs next to nothing.
    """
    if is_pooled(model):
        return HeadBytes()
    head, config = model.get_output_embeddings().weight, model.config.get_text_config()
    rows, columns = upstream.lm_head_tile()
    # TRL computes in the autocast dtype, which is no wider than this
    per_row = columns * model.dtype.itemsize
    if not upstream.has_head_kernel(head.device):
        per_row += TORCH_TILE * min(columns, config.vocab_size)
    return HeadBytes(4 * head.numel() * head.requires_grad, 4 * config.hidden_size, (per_row, rows))


def fixed_bytes(
    models: Sequence[torch.nn.Module], optimizer: tuple[type, dict[str, Any]], held: int = 0, shards: int = 1
) -> int:
    """
    Bytes of the weights of all models, or those `held` before training if other tensors make that more, plus gradients
    and optimizer state of the trained weights of the first model. The state is sharded over `shards` processes.
    """
    trained = [parameter for parameter in models[0].parameters() if parameter.requires_grad]
    loaded = tensor_bytes(tensor for model in models for tensor in weights(model))
    return max(loaded, held) + tensor_bytes(trained) + optimizer_bytes(*optimizer, trained) // shards
