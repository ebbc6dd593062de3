"""What the trainers that generate their own rows add to TRL's: rows become flat where the model is called."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import split_tensor_dict

from .. import upstream
from ..batching.arrange import by_prefix, ranks_of
from ..flat.batch import IGNORE_INDEX, BatchCounts, FlatBatch, row_spans
from ..model.forward import attention_as_before, carry
from ..model.row_parts import RowPart
from .base import FlatTrainer
from .budgeted_passes import BudgetedPasses

# Arguments of TRL's passes that are no part of the rows. All others hold images, or say which tokens stand for them
_PASS_OPTIONS = ("batch_size", "compute_entropy", "compute_aux_loss")


class OnlineTrainer(BudgetedPasses, FlatTrainer):
    """
    Base of the trainers that generate completions and score them in several passes.

    Their batches come from no collator, so the models carry a flattener: the passes of policy, old policy and reference
    become flat where each model is called, under whatever wrappers. Generation is untouched.
    """

    # What TRL's trainers set
    aux_loss_enabled: Any
    pad_to_multiple_of: Any = None
    _buffered_inputs: Any
    _step: int

    def flatten(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> FlatBatch | list[RowPart]:
        """
        The flat batch of rows whose prompts are padded on the left and completions on the right.

        Of rows that do not fit into the memory budget, the parts in which they do.
        """
        assert self.flat is not None
        assert self.flat.route is not None
        # One copy: each waits for the device
        ids, mask, targets = torch.stack([input_ids, attention_mask.long(), labels]).cpu()
        starts, lengths = row_spans(mask)
        firsts = targets.gather(1, torch.tensor(starts)[:, None])[:, 0]
        for row, start in enumerate(starts):
            if start and lengths[row] and firsts[row] != IGNORE_INDEX:
                raise ValueError(
                    f"Row {row} has a completion and no prompt: TRL would predict its first token from padding. Leave "
                    "out empty prompts, or set `padding_free=False`."
                )
        make = partial(
            FlatBatch.from_padded,
            prefix_sharing=self.flat.route.prefix_sharing,
            pad_to_multiple_of=self.pad_to_multiple_of,
            reach=self._reach(input_ids.size(1)),
        )
        device, batch = input_ids.device, make(ids, targets, lengths, starts)
        if not torch.is_grad_enabled():
            return batch.to(device, non_blocking=True)
        # The policy's pass, which trains
        if self.flat.memory is None:
            self.counts.add(batch.counts)
            return batch.to(device, non_blocking=True)

        def made(rows: list[int]) -> FlatBatch:
            return make(ids[rows], targets[rows], [lengths[row] for row in rows], [starts[row] for row in rows])

        in_prompt = mask.bool() & (targets == IGNORE_INDEX)
        prompts = [row[chosen].numpy().tobytes() for row, chosen in zip(ids, in_prompt, strict=True)]
        parts = self.rows_in_memory(batch, prompts, made)
        computed = sum((part.batch.counts for part in parts), BatchCounts())
        self.counts.add(replace(batch.counts, computed=computed.computed, repeated=computed.repeated))
        if len(parts) > 1:
            return [part.to(device) for part in parts]
        parts[0].prepare()
        return parts[0].batch.to(device, non_blocking=True)

    def _reach(self, width: int) -> int | None:
        """The length that rotary frequencies follow where rows are padded to `width` tokens; `None` if they do not."""
        limits = upstream.rotary_limits(self.flat_base(self.model).config.get_text_config())
        return width if any(width >= limit for limit in limits.values()) else None

    def prove_placed(self, model: Any) -> None:
        if self.flat is None:
            return
        if self.flat.awaits_weights:  # the check compares with rows
            for each in self.flat_models():
                carry(self.flat_base(each), None)
        super().prove_placed(model)
        carry(self.flat_base(model), self.flatten)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        beside = [name for name, value in kwargs.items() if name not in _PASS_OPTIONS and value is not None]
        if self.flat is not None and beside:
            raise ValueError(
                f"The rows come with `{beside[0]}`: only SFT and DPO train on images without padding. Leave out "
                "images, also those that tools return, or set `padding_free=False`."
            )
        self.prove_placed(model)
        trl: Any = super()
        return trl._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        trl: Any = super()
        if self.flat is None:
            return trl._generate_single_turn(*args, **kwargs)
        with attention_as_before(self.flat_base(self.model)):
            return trl._generate_single_turn(*args, **kwargs)

    # --- which rows share a micro-batch -----------------------------------------------------------------------------

    def coupled_by(self) -> list[str]:
        """Options under which a row's loss depends on which others share its micro-batch."""
        return ["a router loss"] if self.aux_loss_enabled else []

    def refuse_micro_batches(self) -> None:
        assert self.flat is not None
        options = self.flat.options
        if options.max_tokens_per_micro_batch is not None:
            raise ValueError(
                f"`max_tokens_per_micro_batch={options.max_tokens_per_micro_batch}`: {self.trl_trainer.__name__} knows "
                "its rows only once they are generated, and takes them in micro-batches of "
                "`per_device_train_batch_size`. Lower that, and raise `gradient_accumulation_steps`."
            )
        arranging = f"`arrange_micro_batches={options.arrange_micro_batches!r}`"
        if options.arrange_micro_batches == "tokens":
            raise ValueError(
                f"{arranging} needs rows of known length, and {self.trl_trainer.__name__} generates them: set "
                "'prefix', which brings the rows of one prompt together, or 'none'."
            )
        if options.arrange_micro_batches == "prefix" and (reasons := self.coupled_by()):
            raise ValueError(
                f"{arranging} changes which rows share a micro-batch, and with {', '.join(reasons)} the loss of a row "
                "depends on the others: leave one of them out."
            )

    def _prepare_inputs(self, generation_batch):
        if self.attempted is not None:  # the same rows again
            return self.attempted
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.flat is None or self.flat.options.arrange_micro_batches == "none" or self._buffered_inputs is before:
            return inputs
        steps = self.args.steps_per_generation
        window = math.gcd(self.args.gradient_accumulation_steps, steps)  # these share each optimizer step
        batches = self._buffered_inputs
        windows = [batches[first : first + window] for first in range(0, steps, window)]
        self._buffered_inputs = [batch for each in windows for batch in by_prompt(each)]
        return self._buffered_inputs[self._step % steps]

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def sample_unit(self) -> str:
        return "completions"

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.flat is None and self.model.training:
            masks = [inputs["prompt_mask"], inputs["completion_mask"]]
            slots, real = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
            self.counts.add(BatchCounts(slots, real, slots, 0))
        return super().compute_loss(model, inputs, *args, **kwargs)


def by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Bring the rows of one prompt together.

    Args:
        batches (`list[dict[str, Any]]`):
            Micro-batches of one width, as TRL keeps them: tensors and lists of one entry per row, and values that all
            rows have in common.

    Returns:
        `list[dict[str, Any]]`: The same rows in micro-batches of the same size.

    Examples:
    ```python
    >>> import torch
    >>> from trl_paddingfree.trainers.online import by_prompt
    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in by_prompt(batches)]
    [[[1], [1]], [[2], [2]]]

    ```
    """
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    ranks = ranks_of([row.tobytes() for row in whole["prompt_ids"].cpu().numpy()])
    order = by_prefix(ranks)(list(range(len(ranks))))

    def ordered(value):
        if isinstance(value, torch.Tensor) and value.ndim:
            return value[order]
        return [value[row] for row in order] if isinstance(value, list) else value

    return split_tensor_dict({name: ordered(value) for name, value in whole.items()}, len(batches))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].ndim:
        return torch.cat(values)
    return [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]
