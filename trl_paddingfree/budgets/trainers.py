"""What budgets add to the trainers: they plan before the first step, and divide micro-batches that are too large."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate import DistributedType
from datasets import Dataset

from ..capabilities import module_of
from ..core.data.collate import FlatCollator
from ..core.device import GIB
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..core.flat.counts import BatchCounts, of_all_processes
from ..core.flat.transfer import on_device
from ..core.model.edits import edits, refuse_edits
from ..core.model.restored import attributes_set, random_state_restored
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.engine import is_sharded
from ..core.trainers.runtime import Step, when_flat
from ..coupling import may_couple
from . import planning, refusals
from .device import budget_bytes
from .needs import HeadBytes, fused_head
from .planner import MemoryPlanner
from .steps import Part, TrainingSteps, in_one_thread


class Budgets(FlatTrainer):
    """
    What all trainers within budgets have in common. The class attributes are facts about a loss, which a trainer
    declares whether this capability is there or not.
    """

    head_bytes: ClassVar[Callable[..., HeadBytes]] = staticmethod(fused_head)  # memory of the head, given the models
    changed_by_loss: ClassVar[tuple[str, ...]] = ()  # attributes that TRL's loss updates
    extremes: ClassVar[dict[str, Callable[..., float]]] = {}  # metrics that are a `min` or `max` over a micro-batch
    differences: ClassVar[dict[str, tuple[str, str]]] = {}  # metrics that are the difference of two others
    averaged: ClassVar[tuple[str, ...]] = ()  # metrics of which each process weighs as much, whatever its size
    planner: MemoryPlanner | None = None  # schedules passes within budgets; `None` without one, and until `plan_memory`
    _steps: TrainingSteps | None = None  # training steps within budgets, with the planner
    _resumed_from: str | None = None  # the checkpoint that training resumed from

    def refuse_arguments(self, arguments: Arguments) -> None:
        refusals.refuse_beside_budget(self.runtime.options, arguments["args"])
        super().refuse_arguments(arguments)

    @contextmanager
    def as_it_trains(self, config: Any) -> Iterator[None]:
        """TRL turns checkpointing on if `memory_budget` is to pick the layers that recompute."""
        picks = not self.runtime.pads and self.runtime.options.memory_budget is not None
        names = ("gradient_checkpointing", "activation_checkpointing") if picks else ()
        with super().as_it_trains(config), attributes_set((config, name, True) for name in names):
            yield

    def before_flat(self) -> None:
        self._refuse_hopeless_budget()
        super().before_flat()

    def after_init(self) -> None:
        super().after_init()
        refusals.refuse_lost_router_loss(self.runtime.options, self.args, FlatTrainer.coupled_by(self))
        self.plan_if_placed()
        if self.runtime.options.has_budget:
            self.runtime.around_step.append(self._in_parts)
            self.runtime.around_loss.append(self._within_budget)

    def _refuse_hopeless_budget(self) -> None:
        """
        Refuse a budget that holds no step before the models are proven, which takes longer than to plan: with the least
        budget, as far as lengths of examples are known.
        """
        option, flat = self.runtime.options.memory_budget, self.runtime
        if option in (None, "auto") or is_sharded(self.accelerator):
            return
        budget, needed = budget_bytes(option, self.accelerator.device), planning.bytes_before_tokens(self)
        if needed <= budget:
            return
        flat.check = self.make_check()
        flat.models = flat.check.install_unproven(self.flat_models())
        flat.trained = flat.models[0]
        self.collate_flat()
        with random_state_restored(self.model), flat.check.in_precision():
            self.refuse_small_budget(planning.make_planner(self))
        raise ValueError(
            f"`memory_budget={option}` ({budget / GIB:.3f} GiB) is less than training needs before its first token: "
            f"weights, gradients, the optimizer and the head take {needed / GIB:.3f} GiB, and a step needs more beside "
            "them. Raise it, or set 'auto' for all that the device has."
        )

    # --- planning ---------------------------------------------------------------------------------------------------

    def batches_beside_text(self) -> list[Inputs]:
        """Batches that keep more for the backward pass than text does: a budget counts what their passes keep."""
        return []

    def refuse_small_budget(self, planner: MemoryPlanner) -> None:
        """Refuse a budget that a known example does not fit into."""
        raise NotImplementedError

    def plan_if_placed(self) -> None:
        """Plan before training, if the models already have all of their weights."""
        if not self.runtime.check.unproven and not is_sharded(self.accelerator):
            self.plan_memory(self.model)

    def plan_memory(self, model: torch.nn.Module) -> None:
        """
        Plan for the budgets, prove slices of the `model`, which must have its weights, and refuse a budget that an
        example does not fit into. Does nothing without a budget, or if called again.
        """
        if self.planner is not None or not self.runtime.options.has_budget:
            return
        if vars(self).get("is_distributed_loading_by_transformers"):  # not in all versions of transformers
            raise ValueError(
                "`distributed_config` shards the model as it is loaded, and budgets support accelerate's engines "
                "only: leave `memory_budget` and `max_tokens_per_micro_batch` out, or shard with FSDP2 of "
                "accelerate."
            )
        with random_state_restored(model), in_one_thread(model):  # the user's collator may draw
            with self.runtime.check.in_precision():
                planner = planning.make_planner(self)
            if (slices := module_of("slices", "check")) is not None:
                self.runtime.check.prove_again([model, *self.flat_models()[1:]], slices.IN_SLICES)
            if self._resumed_from is not None:
                planner.restore(self._resumed_from)
            if not planner.has_shrunk:  # if it has, its limit is below the one that the data was checked against
                self.refuse_small_budget(planner)
        # Both at once, and last: after an error above, the next step plans again
        self.planner, self._steps = planner, TrainingSteps(self, planner)

    def scheduling(self) -> AbstractContextManager[None]:
        """Within this context, models schedule each pass within the budgets, whatever calls them."""
        if (planner := self.planner) is None:
            return nullcontext()
        models = (model for model in self.runtime.models if planner not in model.hooks)
        return attributes_set((model, "hooks", (*model.hooks, planner)) for model in models)

    # --- a training step --------------------------------------------------------------------------------------------

    def begin_training(self, model: torch.nn.Module) -> None:
        self.prove(model)
        self.plan_memory(model)  # if that had to wait for the weights
        if self.planner is not None and self._steps is not None:
            # Gradients of an earlier run are gone, and its figures do not count
            self._steps.is_spoilt, self.planner.new = None, []
        super().begin_training(model)

    def _in_parts(self, step: Step, is_normalized: bool, inputs: Inputs) -> torch.Tensor:
        """Around TRL's step."""
        assert self._steps is not None
        parts, counts = self.parts_of(inputs, is_normalized), self.runtime.counts.new
        if parts[0].sizes is not None:  # which share less than the whole
            total = sum((part.inputs["flat_batch"].counts for part in parts), BatchCounts())
            counts[-1] = replace(counts[-1], computed=total.computed, repeated=total.repeated)
        return self._steps.run(step, parts)

    def parts_of(self, inputs: Inputs, is_normalized: bool) -> list[Part]:
        """
        The parts of a micro-batch, computed one after another. Processes whose backward passes are collective get the
        same number. `is_normalized`: the loss is divided by the tokens of the whole step.
        """
        return [Part(inputs)]

    def _within_budget(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around TRL's loss, which may be called outside of any step."""
        with self.scheduling():
            loss = compute(*args, **kwargs)
        if (steps := self._steps) is None:
            return loss
        if (current := steps.planner.current) is not None:
            # Around its reference pass, TRL turned checkpointing off and on again
            steps.planner.set_recompute(current.schedule)
        return loss if steps.part is None else steps.weighted(loss)

    @when_flat
    def prediction_step(self, *args, **kwargs):
        with self.scheduling():
            return super().prediction_step(*args, **kwargs)

    # --- figures and checkpoints ------------------------------------------------------------------------------------

    def logged_figures(self) -> dict[str, float]:
        return super().logged_figures() | ({} if self.planner is None else self.planner.figures())

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # makes the folder, and runs in every process
        if self.planner is not None:
            self.planner.save(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._resumed_from = checkpoint
            if self.planner is not None:
                self.planner.restore(checkpoint)
        super()._load_rng_state(checkpoint)


class BudgetsCollated(Budgets, collated.Collated):
    """For trainers with a collator."""

    refuse_small_budget = planning.refuse_small_budget

    def collated_with(self) -> dict[str, Any]:
        return super().collated_with() | {"keeps_rows": self.runtime.options.has_budget}

    def refuse_options(self) -> None:
        super().refuse_options()
        if self.runtime.options.has_budget and not may_couple(self):
            refusals.refuse_lost_gradients(self.accelerator, self.args)

    @when_flat
    def _precompute_ref_logps(self, *args, **kwargs):
        self.start_flat()
        self.plan_if_placed()
        with self._without_rows(), self.scheduling():
            return super()._precompute_ref_logps(*args, **kwargs)

    def _without_rows(self) -> AbstractContextManager[None]:
        """Within this context, data loaders are made whose batches keep no rows: passes without gradients need none."""
        collator = self.data_collator  # by now, it may be one that was set since
        keeps_rows = self.runtime.options.has_budget and isinstance(collator, FlatCollator)
        return attributes_set([(self, "data_collator", collator.changed(keeps_rows=False))] if keeps_rows else [])

    @when_flat
    def get_eval_dataloader(self, *args, **kwargs):
        with self._without_rows():
            return super().get_eval_dataloader(*args, **kwargs)

    @when_flat
    def get_test_dataloader(self, *args, **kwargs):
        with self._without_rows():
            return super().get_test_dataloader(*args, **kwargs)

    # --- a micro-batch in parts -------------------------------------------------------------------------------------

    def parts_of(self, inputs: Inputs, is_normalized: bool) -> list[Part]:
        if "rows" not in inputs:
            refusals.refuse_lost_rows()
        assert self.planner is not None
        parts, is_alone = [Part(inputs)], self.accelerator.num_processes == 1
        if not (is_alone and self.planner.is_whole(inputs["flat_batch"])) and not may_couple(self):
            parts = self._weighted_parts(inputs, is_normalized)
        return [replace(part, inputs={n: x for n, x in part.inputs.items() if n != "rows"}) for part in parts]

    def _weighted_parts(self, inputs: Inputs, is_normalized: bool) -> list[Part]:
        """The parts of a micro-batch whose losses add up. Sizes, and thus weights, are counted on the host."""
        accelerator = self.accelerator
        # Those with images come last: in the last part, DDP waits for gradients of all weights, including the tower's
        batches = sorted(self._divided(inputs), key=_has_images)
        most = len(batches)
        if is_sharded(accelerator) or accelerator.distributed_type == DistributedType.DEEPSPEED:
            # Backward passes are collective, so processes with fewer parts repeat their last one, masked
            is_mixed = len({*map(_has_images, batches)}) > 1
            most, is_mixed = of_all_processes([most, is_mixed], accelerator).amax(0).tolist()
            if is_mixed and accelerator.num_processes > 1:
                raise ValueError(
                    "A micro-batch above its budget has parts with images and parts without, and under FSDP and "
                    "DeepSpeed all processes compute the vision tower together: raise `memory_budget` or "
                    "`max_tokens_per_micro_batch`, leave it out, or train on examples that all have images."
                )
            if most == 1:  # no process divided its micro-batch; if one did, all gather `PartMetrics`
                return [Part(inputs)]
        sizes = [self.part_sizes(batch["rows"].rows if "rows" in batch else batch) for batch in batches]
        total = max(sum(size["loss"] for size in sizes), 1)
        weights = [1.0 if is_normalized else size["loss"] / total for size in sizes]
        parts = list(map(Part, batches, sizes, weights))
        if len(parts) < most:
            masked = {**batches[-1], "attention_mask": torch.zeros_like(batches[-1]["attention_mask"])}
            parts += [Part(masked, dict.fromkeys(sizes[-1], 0), 0.0)] * (most - len(parts))
        return parts

    def _divided(self, inputs: Inputs) -> list[Inputs]:
        """The batches into which the planner divides one; just that one if it fits or has a single item."""
        whole, rows, planner, collator = inputs["flat_batch"], inputs["rows"], self.planner, self.data_collator
        assert planner is not None
        # Sizes and parts are made from the rows on the host, which do not show edits
        labels, made = map(collator.row_labels, (inputs, rows.rows))
        found = edits(whole, {**inputs, "labels": labels}, on_device(made, labels.device))
        self.runtime.trained.edits.add(found, refuse_edits)
        if rows.num_items == 1 or planner.is_whole(whole):
            return [inputs]
        refusals.refuse_lost_values(inputs, rows.rows)
        features = list(map(planner.features, rows.alone(collator)))
        parts = [rows.take(items, collator).with_flat(collator) for items in planner.parts(features)]
        # transformers moves tensors, but not flat batches: the data loader has only moved that of the whole
        return [{**part, "flat_batch": part["flat_batch"].to(self.args.device, non_blocking=True)} for part in parts]


def _has_images(part: Inputs) -> bool:
    """Whether a part of a micro-batch needs modules beside the decoder: towers of images."""
    return any(hook.numbers for hook in part["flat_batch"].hooks)


class BudgetsOnline(Budgets):
    """For trainers that generate their rows. Micro-batches stay whole, and run in slices."""

    knows_prompts: bool  # of all trainers that generate
    # Set by TRL's trainers
    max_completion_length: int | None
    _tokenize_prompts: Callable[..., tuple[list[list[int]], ...]]
    _generated: Inputs | None = None  # the rows of the last pass, for a retry

    def refuse_arguments(self, arguments: Arguments) -> None:
        config = arguments["args"]
        if self.runtime.options.memory_budget == "auto" and config.use_vllm and config.vllm_mode == "colocate":
            raise ValueError(
                "`memory_budget='auto'` with `vllm_mode='colocate'` does not know what vLLM leaves: set the GiB "
                "that this process may use, including what vLLM holds."
            )
        super().refuse_arguments(arguments)

    @when_flat
    def _prepare_inputs(self, generation_batch):
        steps = self._steps if self.model.training else None
        if steps is not None and steps.attempt.has_failed:
            return self._generated
        inputs = super()._prepare_inputs(generation_batch)
        if steps is not None:
            self._generated = inputs
            steps.remember()  # only now: a retry must not undo generation
        return inputs

    def refuse_small_budget(self, planner: MemoryPlanner) -> None:
        """Refuse a budget that a micro-batch does not fit into if all its rows have the maximum length."""
        if self.max_completion_length is None:
            return
        prompt, completion = self.longest_prompt(), self.max_completion_length
        name = f"a prompt of {prompt} tokens with a completion of `max_completion_length={completion}`"
        planner.refuse_oversized(prompt + completion, name)
        if planner.needs is None:
            return
        number = self.args.per_device_train_batch_size
        rows = [[0] * prompt + [i + 1] * completion for i in range(number)]  # all with one prompt
        labels = [[IGNORE_INDEX] * prompt + row[prompt:] for row in rows]
        # Refused if rows of one prompt do not fit. The error names a budget that also holds rows with a prompt each
        shared = FlatBatch.from_rows(rows, labels, prefix_sharing=self.runtime.trained.route.prefix_sharing)
        if planner.least_bytes(shared) > planner.budget:
            apart = FlatBatch.from_rows(rows, labels, prefix_sharing=False)
            larger = max(shared, apart, key=planner.least_bytes)  # which it is depends on the lengths
            named = f"a micro-batch of {number} rows, each {name}"
            raise planner.too_small_for(larger, named, "`max_completion_length`")

    def longest_prompt(self) -> int:
        """Tokens of the prompt with the most characters; 1 if no prompt is known yet."""
        data = self.train_dataset
        if not isinstance(data, Dataset) or not self.knows_prompts:
            return 1
        longest = max(data["prompt"], key=lambda prompt: len(str(prompt)))
        return len(self._tokenize_prompts([longest])[0][0])


Collated = BudgetsCollated
Online = BudgetsOnline
