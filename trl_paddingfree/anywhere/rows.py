"""Which padded calls are plain rows, their flat batches, and why other calls are computed as before."""

import inspect

import torch

from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.flat.transfer import Arriving, on_device
from ..core.model import architecture
from ..core.model.architecture import CACHES, TYPE_ROWS
from ..core.model.flat_model import FlatModel
from ..padded import counts_by_mask, default_positions, flattened_at, jumps, scores_padding

# Arguments of a call that the flat batch replaces
ROWS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHES)
# Arguments for heads, which no layer reads
_LABELS = ("labels", "shift_labels")
OF_HEADS = (*_LABELS, "logits_to_keep", "num_items_in_batch")
_OUTPUTS = ("output_hidden_states", "output_attentions")


class PaddedRows:
    """Reads the padded calls of one model."""

    def __init__(self, flat_model: FlatModel):
        self.flat_model = flat_model
        self.model = model = flat_model.model
        self.classifies_rows = architecture.classifies_rows(model)
        # Whether positions, if not given, are counted from the first token of a row (as in OPT), not by column
        self.counts_by_mask = counts_by_mask(model)
        # Token types, which tokenizers return even for models that do not take them
        self.ignored = {*TYPE_ROWS} - inspect.signature(model.base_model.forward).parameters.keys()
        self.follows_longest = bool(architecture.rotary_limits(model.config.get_text_config()))
        self.shares_prefixes = True  # if the route does
        # Whether calls are computed flat if they have padding on the left, ask for router losses, or have labels
        self.with_left_padding = self.with_routers = self.with_labels = True
        # Whether the loss reads answers at padding, such as predictions of first tokens by padding on the left; `None`
        # until a backward pass could tell
        self.reads_padding: bool | None = None
        self.arriving = Arriving()  # what backward passes have seen

    def _wants(self, inputs: Inputs, name: str) -> bool:
        """Whether a call asks for `name`, or the configuration if the call leaves it unset."""
        return architecture.wants(self.model.config.get_text_config(), inputs, name)

    def _why_no_rows(self, inputs: Inputs) -> str:
        """Why the arguments of a call, whatever their values, are not plain rows; empty if they may be."""
        rows = inputs.get("input_ids")
        extra = inputs.keys() - {*ROWS, *OF_HEADS, *self.ignored}
        if not torch.is_tensor(rows) or rows.ndim != 2 or inputs.get("inputs_embeds") is not None:
            return "it gets embeddings instead of `input_ids` of shape `(rows, tokens)`"
        if any(inputs.get(name) is not None for name in CACHES) or inputs.get("use_cache") is True:
            return "it computes with a cache"
        if not (self.model.training and torch.is_grad_enabled()) and self._wants(inputs, "use_cache"):
            return "in evaluation mode it makes a cache; if you need none, set `model.config.use_cache = False`"
        if rows.size(1) == 1:
            return "its rows have one token"
        if inputs.get("is_causal", vars(self.model.config.get_text_config()).get("is_causal")) is False:
            return "`is_causal=False` has tokens see those that follow"
        if wanted := [name for name in _OUTPUTS if self._wants(inputs, name)]:
            return f"`{wanted[0]}` asks for the values of all layers"
        if not self.with_routers and self._wants(inputs, "output_router_logits"):
            return "the loss of its routers counts padding, too"
        if not self.with_labels and inputs.get("labels") is not None:
            return "given `labels`, its head reads padding, or rows that come by other arguments"
        if others := [name for name in extra if isinstance(inputs[name], torch.Tensor | list | tuple)]:
            return f"`{others[0]}` comes with its rows, and a flat batch has no place for it"
        # Labels of columns that a call keeps are of other shapes: which of them score padding is not known
        for name in ("attention_mask", "position_ids", *_LABELS[2 * self.flat_model.is_pooled :]):
            x, all_alike = inputs.get(name), name == "position_ids"
            if x is not None and getattr(x, "shape", None) not in (rows.shape, (1, rows.size(1)))[: 1 + all_alike]:
                return f"its `{name}` is not one number for each token"
        return ""

    def _flat_batch_of(self, inputs: Inputs) -> tuple[FlatBatch | str, torch.Tensor | None]:
        """
        The flat batch or why there is none, from values copied to the host. Also which tokens of the answer `(R, L)`
        are padding, if the backward pass is to tell whether the loss reads these.
        """
        rows = inputs["input_ids"]
        labels = () if self.classifies_rows else _LABELS
        given = {name: inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids", *labels)}
        shapes = (rows.shape, (1, rows.size(1)))
        values = _on_host({k: x.expand_as(rows) for k, x in given.items() if torch.is_tensor(x) and x.shape in shapes})
        self.arriving.read()  # has arrived, as the host has waited for the rows
        ids = values["input_ids"]
        mask = values.get("attention_mask", torch.ones_like(ids))
        real = mask.bool()
        if (mask != real).any():
            return "its `attention_mask` has numbers other than 0 and 1", None
        begins = mask.diff() > 0
        if (begins.sum(1) + real[:, 0] > 1).any():  # a head may predict the token after a gap from the padding in it
            return "it has padding between the tokens of a row", None
        if begins.any() and not self.with_left_padding:
            return "it has padding on the left, which changes what the model itself computes for a row", None
        if begins.any() and torch.is_tensor(inputs.get("logits_to_keep")):
            return "it has padding on the left, and `logits_to_keep` picks columns of it", None
        positions = values.get("position_ids")
        if positions is None:
            positions = default_positions(mask, self.counts_by_mask)
        elif jumps(positions, real).any():
            return "its `position_ids` restart or skip numbers, as in packed rows", None
        # The answer would depend on what the model computes for padding
        for name in values.keys() & _LABELS:
            # The heads of most language models score the label of the next token, those of some (Whisper) their own
            moves = name == "labels" and not self.flat_model.is_pooled
            if scores_padding(values[name], real, moves).any():
                return f"`{name}` has values other than {IGNORE_INDEX} where padding would be scored", None
        if self.classifies_rows:
            padding = self.model.config.get_text_config().pad_token_id  # the head finds the last token by this id
            found = torch.ones_like(real) if padding is None else ids != padding
            last = (torch.arange(ids.size(1)) * found).argmax(1, keepdim=True)
            if not real.gather(1, last).all():
                return (
                    f"its head reads padding, as `config.pad_token_id={padding}` is another token than padding has",
                    None,
                )
        padding, kept = None, inputs.get("logits_to_keep")
        if torch.is_grad_enabled() and not real.all():
            padding = on_device(~real, rows.device)
            padding = padding[:, kept] if torch.is_tensor(kept) else padding[:, -(kept or 0) :]
        # Whether the answer holds predictions of first tokens, made by padding on the left
        predicts_first = begins[:, max(0, ids.size(1) - kept) :] if isinstance(kept, int) and kept else begins
        is_told = values.keys() & _LABELS or self.flat_model.is_pooled
        if predicts_first.any() and not is_told and (self.reads_padding is not False or not torch.is_grad_enabled()):
            reason = (
                "it has padding on the left, and its loss may score the first token of a row, which padding predicts: "
                "give the model `labels` or `logits_to_keep`, or have a backward pass show that no loss does"
            )
            return reason, padding
        reach = int(positions.max()) + 1 if self.follows_longest else None
        is_shared = self.shares_prefixes and self.flat_model.route.prefix_sharing
        return flattened_at(positions, ids, mask, prefix_sharing=is_shared, reach=reach), padding


def _on_host(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of one shape as int64 on the CPU, in a single copy, because each copy waits for the device."""
    # Floats that are not whole become 2: transformers reads them as true, and `long()` would turn 0.5 into 0
    whole = [torch.where(x.long() == x, x, 2).long() for x in rows.values()]
    return dict(zip(rows, torch.stack([x.to(whole[0].device) for x in whole]).cpu(), strict=True))
