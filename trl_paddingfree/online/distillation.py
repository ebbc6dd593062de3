"""Distillation without padding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel
from trl import DistillationConfig, DistillationTrainer

from ..capabilities import module_of
from ..core import upstream
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.model.architecture import TYPE_ROWS
from ..core.model.flat_model import FlatModel
from ..core.trainers.configs import Arguments, PaddingFreeOptions
from ..core.trainers.runtime import when_flat
from .base import PROMPTS
from .composed import OnlineTrainer

if TYPE_CHECKING:
    from ..budgets.needs import HeadBytes

# Without Triton, TRL computes a tile's gradient with up to ten more float32 tensors of the tile's size
_TORCH_TILES = 10


def divergence(student: PreTrainedModel, teacher: PreTrainedModel) -> "HeadBytes":
    """Bytes of TRL's divergence, which keeps the teacher's hidden states, and works on tiles of both models' logits."""
    rows, columns = upstream.divergence_tile()
    per_row = 2 * 4 * columns + student.dtype.itemsize * columns  # logits of both in float32, and the gradient
    if not upstream.has_head_kernel(student.device):
        per_row += 4 * _TORCH_TILES * min(columns, student.config.get_text_config().vocab_size)
    kept = teacher.dtype.itemsize * teacher.config.get_text_config().hidden_size
    fused = module_of("budgets", "needs").fused_head(student)  # only budgets ask
    return replace(fused, tile=(per_row, rows), kept=kept, in_chunks=False)


class _Rows(NamedTuple):
    """The rows of a micro-batch."""

    ids: torch.Tensor  # (R, L), as `mask`
    mask: torch.Tensor
    labels: torch.Tensor  # (R, L), on the host
    scored: torch.Tensor  # (R, L-1), on the host: which tokens are scored, from the second one on
    batch: FlatBatch
    others: Inputs  # what models get beside
    types: Inputs  # of tokens, (R, L), which padded calls take, too


@dataclass
class PaddingFreeDistillationConfig(PaddingFreeOptions, DistillationConfig):
    """TRL's [`~trl.DistillationConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeDistillationTrainer(OnlineTrainer, DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, student and teacher compute the
    generated completions as one flat row, in which prefixes that prompts share appear once. The teacher runs first,
    before the student keeps any activations, and only scored tokens enter the divergence. Generation is TRL's.
    See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from trl_paddingfree import PaddingFreeDistillationConfig, PaddingFreeDistillationTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> tokenizer = make_tokenizer(["one two three eleven"])
    >>> options = {"max_completion_length": 4, "use_cpu": True, "bf16": False, "report_to": "none"}
    >>> args = PaddingFreeDistillationConfig(mkdtemp(), **options)
    >>> data = {"train_dataset": Dataset.from_list([{"prompt": "one two three"}] * 8), "processing_class": tokenizer}
    >>> student, teacher = make_model(tokenizer), make_model(tokenizer)  # or the names of two on the hub
    >>> trainer = PaddingFreeDistillationTrainer(student, teacher, args, **data)
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = replace(PROMPTS, name="distillation", reads=("prompt",))
    trl_trainer, trl_config = DistillationTrainer, DistillationConfig
    config_class = PaddingFreeDistillationConfig
    head_bytes = staticmethod(divergence)
    # The hidden states of a micro-batch's scored tokens, by model, with gradients or without: cached
    _states: Callable[[torch.nn.Module, bool], torch.Tensor]
    _rows: _Rows  # of the same micro-batch

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        if arguments.get("teacher_model") is None:
            raise ValueError(
                "`teacher_model` is missing, whose predictions the student learns: give the trainer a model, or the "
                "name of one."
            )

    def flat_models(self) -> list[torch.nn.Module]:
        return [self.model, self.teacher_model]

    @property
    def steps_per_generation(self) -> int:
        return self.args.gradient_accumulation_steps

    @when_flat
    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        """TRL's loss over a single row, which holds all scored tokens."""
        self._rows = rows = self._rows_of(inputs)
        ids, mask = rows.ids, rows.mask

        @cache
        def states(model, has_gradients):
            if (flat_model := FlatModel.of(model)) is None:
                raise self.forward_replaced(model)
            return flat_model.hidden_states(rows.batch, rows.scored, **rows.others)

        self._states = states
        ones = ids.new_ones(1, int(rows.scored.sum()))
        no_prompt = ones[:, :0]
        row = {"prompt_ids": no_prompt, "prompt_mask": no_prompt, "completion_ids": ones, "completion_mask": ones}
        self.teacher_model.eval()  # DeepSpeed's engine returns nothing
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        try:
            with torch.no_grad():
                call = self._forward_redirection
                call(self.teacher_model, teacher, self._get_last_hidden_state, teacher, ids, mask, len(ids))
            return super()._compute_loss(unwrapped_student, row, num_items_in_batch)
        finally:
            del self._states, self._rows

    def _rows_of(self, inputs: Inputs) -> _Rows:
        ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        scored = torch.cat([0 * inputs["prompt_mask"], inputs["completion_mask"] * inputs.get("tool_mask", 1)], 1)
        host_ids, host_mask, scored = torch.stack([ids, mask, scored]).cpu()  # in one copy: each waits for the device
        labels = host_ids.masked_fill(scored == 0, IGNORE_INDEX)
        batch = self.flattener(inputs)(host_ids, host_mask, labels).to(ids.device, non_blocking=True)
        types = {name: inputs[name] for name in TYPE_ROWS if inputs.get(name) is not None}
        return _Rows(ids, mask, labels, scored[:, 1:] > 0, batch, self.beside_rows(inputs), types)

    def rows_of_call(
        self, flat_model: FlatModel, args: tuple[Any, ...], kwargs: Inputs
    ) -> tuple[Inputs, FlatBatch] | None:
        # TRL calls the student for the whole loss of some inputs, and within it, the teacher for its hidden states
        inputs = next((x for x in args if isinstance(x, dict)), None)
        rows = vars(self).get("_rows") if inputs is None else self._rows_of(inputs)
        if rows is None:
            return super().rows_of_call(flat_model, args, kwargs)
        labels = rows.labels.to(rows.ids.device)
        given = {"input_ids": rows.ids, "attention_mask": rows.mask, "labels": labels, "fused_lm_head": True}
        return {**rows.others, **rows.types, **given}, rows.batch

    @when_flat
    def _get_last_hidden_state(self, unwrapped_model, *args, **kwargs):
        """`(1, N, D)`, of the scored tokens. TRL asks for those of both models; the teacher's are already cached."""
        return self._states(unwrapped_model, torch.is_grad_enabled())
