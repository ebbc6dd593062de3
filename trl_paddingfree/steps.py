"""The examples of one optimizer step: which of them share a micro-batch, and how many tokens run at once."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from pyarrow.compute import list_value_length
from torch.utils.data import RandomSampler
from transformers import Trainer

from .sampling import StepSampler, by_prefix, by_tokens, example_tokens, example_work, ranks_of


class StepTrainer(Trainer):
    """The part of the padding-free trainers that arranges and splits micro-batches."""

    token_columns: list[str]  # columns of the prepared data that hold token ids
    part_weight: float = 1.0  # share of a micro-batch that is being computed
    flat_options: Any = None  # the PaddingFreeOptions; `None`: the trainer is TRL's own
    flat_check: Any = None  # the CheckResult of the start-up check
    step_sampler: StepSampler | None = None  # the order of training, if `arrange_micro_batches` makes one
    train_dataset: Any
    data_collator: Any
    model: Any
    args: Any
    # What Trainer and TRL's trainers set
    _train_batch_size: int
    _total_train_tokens: int
    _metrics: Any
    aux_loss_enabled: Any
    router_aux_loss_coef: Any

    def coupled_by(self) -> list[str]:
        """Options under which an example's loss depends on which others share its micro-batch."""
        aux_loss = f"`router_aux_loss_coef={self.router_aux_loss_coef}`"
        return [aux_loss] if self.aux_loss_enabled else []

    def weighed_by_micro_batch(self) -> list[str]:
        """Options under which the weight of an example in a step depends on its micro-batch, or on its process."""
        return []

    def example_lengths(self) -> np.ndarray:
        """`(examples, 3)` or `(examples, 1)` int64: lengths of what each training example holds, after truncation."""
        columns = self.train_dataset.select_columns(self.token_columns).with_format("arrow")
        tables = columns.iter(batch_size=10_000)
        lengths = [
            np.stack([list_value_length(table[c]).to_numpy() for c in self.token_columns], 1) for table in tables
        ]
        return np.concatenate(lengths).astype(np.int64)

    def example_prefixes(self) -> np.ndarray:
        """`(examples,)` int64: rank of each training example when they are sorted by their first column of tokens."""
        column = self.train_dataset.with_format("numpy", columns=self.token_columns[:1])
        return ranks_of([np.asarray(row[self.token_columns[0]], dtype=np.int64).tobytes() for row in column])

    def check_micro_batches(self) -> None:
        """Refuse options that move examples between micro-batches where that would change the loss."""
        options = self.flat_options
        moving = {
            f"arrange_micro_batches={options.arrange_micro_batches!r}": options.arrange_micro_batches != "none",
            f"max_tokens_per_micro_batch={options.max_tokens_per_micro_batch}": options.max_tokens_per_micro_batch,
        }
        for name in (name for name, used in moving.items() if used):
            weighed = self.weighed_by_micro_batch() if name.startswith("arrange") else []
            if reasons := self.coupled_by() + weighed:
                raise ValueError(
                    f"`{name}` changes which examples share a micro-batch, and with {', '.join(reasons)} the loss of "
                    "an example depends on the others: leave one of them out."
                )
        if options.arrange_micro_batches != "none" and not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"`arrange_micro_batches={options.arrange_micro_batches!r}` needs a data set of known length to look "
                "ahead in, and a streaming one has none: leave it out, or load the data set without `streaming`."
            )
        if options.arrange_micro_batches != "none" and self.args.train_sampling_strategy == "batch_rebalance":
            raise ValueError(
                f"`arrange_micro_batches={options.arrange_micro_batches!r}` and "
                "`train_sampling_strategy='batch_rebalance'` both decide which examples share a micro-batch: leave one "
                "of them out."
            )
        limit = options.max_tokens_per_micro_batch
        if limit and options.oversized_examples == "error" and isinstance(self.train_dataset, Dataset):
            tokens = example_tokens(self.example_lengths(), self.flat_check.prefix_sharing)
            longest = int(tokens.argmax())
            if tokens[longest] > limit:
                raise ValueError(
                    f"`max_tokens_per_micro_batch={limit}` is less than example {longest} of the training data needs "
                    f"({tokens[longest]} tokens). Raise it, lower `max_length`, or set `oversized_examples='alone'`."
                )

    def _get_train_sampler(self, *args, **kwargs):
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        if self.flat_options is None or self.flat_options.arrange_micro_batches == "none":
            return sampler
        if isinstance(sampler, RandomSampler):  # what accelerate would put in its place, had it found it
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=self.args.data_seed)
        # `auto_find_batch_size` leaves the size in `args` as it was
        batch_size, processes = self._train_batch_size, self.accelerator.num_processes
        if self.flat_options.arrange_micro_batches == "prefix":
            arrange = by_prefix(self.example_prefixes())
        else:
            hidden_size = self.model.config.get_text_config().hidden_size
            work = example_work(self.example_lengths(), self.flat_check.prefix_sharing, hidden_size)
            arrange = by_tokens(work, batch_size, processes)
        step_size = batch_size * processes * self.args.gradient_accumulation_steps
        self.step_sampler = StepSampler(sampler, step_size, arrange)
        return self.step_sampler

    def get_train_dataloader(self):
        if self.flat_options is None:
            return super().get_train_dataloader()
        collator = self.data_collator
        if limit := self.flat_options.max_tokens_per_micro_batch:
            # In training only: evaluation keeps no activations and needs no parts
            self.data_collator = replace(collator, max_tokens=limit)
        try:
            loader: Any = super().get_train_dataloader()
        finally:
            self.data_collator = collator
        if self.step_sampler is not None:
            # accelerate finds its own samplers only: a run that several processes resume would go on at epoch 0
            loader.set_sampler(self.step_sampler)
        return loader

    def part_sizes(self, inputs: dict[str, Any]) -> dict[str, int]:
        """What the loss, under the name "loss", and each metric of a part of a micro-batch is a mean over: how many."""
        raise NotImplementedError

    def training_step(self, model, inputs, *args, **kwargs):
        parts, idle = inputs.pop("parts", [inputs]), 0
        if self.flat_options is not None and self.flat_options.max_tokens_per_micro_batch:
            idle = self._most_parts(len(parts)) - len(parts)
            # Where weights are sharded, processes gather them together: those with fewer parts repeat one for nothing
            parts += idle * [{**parts[-1], "attention_mask": torch.zeros_like(parts[-1]["attention_mask"])}]
        self.count(inputs, parts)
        if len(parts) == 1:
            return super().training_step(model, inputs, *args, **kwargs)
        return self._step_in_parts(model, parts, idle, *args, **kwargs)

    def count(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Take note of a micro-batch and of the parts that it is computed in."""

    def _most_parts(self, num_parts: int) -> int:
        """The most parts that any process has."""
        if self.accelerator.num_processes == 1:
            return num_parts
        return int(self.accelerator.gather(torch.tensor([num_parts], device=self.accelerator.device)).max())

    def _step_in_parts(self, model, parts, idle, num_items_in_batch=None):
        """One micro-batch as several forward and backward passes, with its loss, its gradients and its metrics."""
        sizes = [self.part_sizes(part) for part in parts]
        for counted in sizes[len(parts) - idle :]:
            counted.update(dict.fromkeys(counted, 0))
        whole = max(sum(counted["loss"] for counted in sizes), 1)
        metrics, tokens_before = self._metrics["train"], self._total_train_tokens
        # Of each metric times what it is a mean over, and of that
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
        sync_gradients, loss = self.accelerator.sync_gradients, torch.zeros((), device=self.accelerator.device)
        for i, (part, counted) in enumerate(zip(parts, sizes, strict=True)):
            last = i == len(parts) - 1
            # A loss that is normalized by the tokens of the whole step adds up by itself
            added = float(i < len(parts) - idle)
            self.part_weight = counted["loss"] / whole if num_items_in_batch is None else added
            self.accelerator.gradient_state._set_sync_gradients(sync_gradients and last)
            # DeepSpeed goes by the flag above, and has a `no_sync` that refuses some of its stages
            holds = last or self.accelerator.distributed_type == DistributedType.DEEPSPEED
            logged = {name: len(values) for name, values in metrics.items()}
            with self._own_metrics(), nullcontext() if holds else self.accelerator.no_sync(model):
                loss += super().training_step(model, part, num_items_in_batch)
            for name in (name for name, values in metrics.items() if len(values) > logged.get(name, 0)):
                value, size = metrics[name].pop(), counted.get(name, counted["loss"])
                sums[name] += (value * size, size)
        self.part_weight = 1.0
        self._add_metrics(sums, tokens_before)
        return loss

    @contextmanager
    def _own_metrics(self) -> Iterator[None]:
        """Within this context, TRL's metrics are those of this process: parts differ in size from those of others."""
        accelerator: Any = self.accelerator
        accelerator.gather = accelerator.gather_for_metrics = lambda tensor: tensor
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

    def _add_metrics(self, sums: dict[str, np.ndarray], tokens_before: int) -> None:
        """Log the metrics of a micro-batch, from weighted sums, and sums of weights, over its parts."""
        names = sorted(sums)
        values = [*(x for name in names for x in sums[name]), float(self._total_train_tokens - tokens_before)]
        *totals, tokens = (
            self.accelerator.gather(torch.tensor([values], device=self.accelerator.device)).sum(0).tolist()
        )
        metrics = self._metrics["train"]
        for name, total, size in zip(names, totals[::2], totals[1::2], strict=True):
            metrics[name].append(total / max(size, 1))
        self._total_train_tokens = tokens_before + int(tokens)
        metrics["num_tokens"] = [self._total_train_tokens]
