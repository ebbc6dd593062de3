"""What both trainers add to TRL's: one model forward, one check, one set of figures."""

import inspect
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.trainer.utils import get_config_model_id

from .batch import BatchCounts
from .check import CheckResult, UnprovenModelError, prove
from .checkpoints import checkpoint_to_resume, state_file
from .configs import PaddingFreeOptions
from .forward import Route, choose_route, install
from .memory import peak_memory
from .model_card import describe_method
from .noise import silence
from .steps import StepTrainer
from .validation import refuse_unflattenable

logger = logging.get_logger(__name__)


class PaddingFreeTrainer(StepTrainer):
    """
    Base of the padding-free trainers, mixed in before one of TRL's.

    A subclass names TRL's trainer and the classes that go with it, and TRL's `__init__` is run by `start`.
    """

    trl_trainer: Any  # TRL's trainer class
    example_name: str  # what a batch holds
    flat_config: Any  # our config and collator classes for it
    flat_collator: Any
    unproven: bool = False  # whether the start-up check is still to come

    def start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run TRL's `__init__` with the arguments that its signature gives them, and then make the trainer flat."""
        silence()
        # Counts of this process: before the last log, and since
        self.batch_counts, self.new_counts, self.logged_at = BatchCounts(), BatchCounts(), time.perf_counter()
        arguments = inspect.signature(self.trl_trainer.__init__).bind(self, *args, **kwargs).arguments
        del arguments["self"]
        if arguments.get("args") is None:
            model = arguments["model"]
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            arguments["args"] = self.flat_config(f"{name.split('/')[-1]}-{self.trl_trainer._name}")
        config = arguments["args"]
        if not config.padding_free:
            self.trl_trainer.__init__(self, **arguments)
            return
        self.flat_options = config
        if not isinstance(config, PaddingFreeOptions):  # a config of TRL's own
            self.flat_options = PaddingFreeOptions(prefix_sharing=self.flat_config.prefix_sharing)
        refuse_unflattenable(arguments, self.flat_collator)
        config.padding_free = False  # TRL's own flag warns and pads (DPO), or refuses `max_length` (SFT)
        try:
            self.trl_trainer.__init__(self, **arguments)
        finally:
            config.padding_free = True
        self.padding_free = True
        self.start_flat()
        self.check_micro_batches()

    def flat_models(self) -> list[Any]:
        """The models that compute batches, under whatever wrappers."""
        return [self.model]

    def start_flat(self) -> None:
        """
        Prove the models, install the flat forward on them, and have the collator make flat batches. Once.

        Prefixes are shared only if every model passes with shared prefixes.
        """
        if self.flat_check is not None:
            return
        if all(map(self._is_placed, self.flat_models())):
            self.flat_check = self._prove_all(self.flat_options.prefix_sharing)
        else:  # the engine shards and places the weights when training starts: the check waits for it
            for model in self.flat_models():
                install(self.flat_base(model), self._route(model))
            self.flat_check = CheckResult(self._route(self.model), self.flat_options.prefix_sharing)
            self.unproven = True
        if not isinstance(self.data_collator, self.flat_collator):
            self.data_collator = self.flat_collator(**vars(self.data_collator))
        # A copy: the user's own collator may serve another trainer
        self.data_collator = replace(
            self.data_collator,
            padding_free=True,
            prefix_sharing=self.flat_check.prefix_sharing,
            max_tokens=None,
        )

    def _is_placed(self, model: Any) -> bool:
        """Whether `model` can be called now. DeepSpeed's own engines can, the models that it has yet to take cannot."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        if plugin is not None and plugin.zero_stage == 3:
            return model is not self.model
        return self.flat_base(model).device.type == self.accelerator.device.type

    def _route(self, model: Any) -> Route:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        device = self.flat_base(model).device
        device = self.accelerator.device if device.type == "cpu" else device
        return choose_route(self.flat_base(model), self.flat_options.flat_attention, dtype, device)

    def _prove_all(self, sharing: bool, *models: Any) -> CheckResult:
        """Prove every model, and turn sharing off for all of them if one cannot."""
        started = time.perf_counter()
        models = models or tuple(self.flat_models())
        results = [self._prove(model, sharing) for model in models]
        if sharing and not all(result.prefix_sharing for result in results):
            results = [self._prove(model, False) for model in models]
        if self.is_world_process_zero():
            logger.warning(
                f"Padding-free, {results[0]}. The start-up check took {time.perf_counter() - started:.1f} s."
            )
        return results[0]

    def _prove(self, model: Any, prefix_sharing: bool) -> CheckResult:
        base, fallback = self.flat_base(model), self.flat_options.flat_attention == "auto"
        # FSDP2 casts weights and inputs instead
        with nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.autocast():
            result, failed = prove(
                base,
                self._route(model),
                prefix_sharing=prefix_sharing,
                fallback=fallback,
                call=model,
                agree=self._all_agree,
            )
        if failed and self.is_world_process_zero():
            tried = "\n    ".join(map(str, failed))
            logger.warning(
                f"{type(base).__name__} trains as «{result}», because the start-up check failed as\n    {tried}"
            )
        return result

    def _all_agree(self, verdict: bool) -> bool:
        """Whether a check says so on all processes: they have to take the same route."""
        return bool(self.accelerator.gather(torch.tensor([verdict], device=self.accelerator.device)).all())

    def prove_placed(self, model: Any) -> None:
        """The check of models that had no weights to call when the trainer was made, before they compute anything."""
        models = [model]
        if self.flat_base(model) is self.flat_base(self.model):
            self.unproven = False
            models += self.flat_models()[1:]
        planned = self.flat_check
        self.flat_check = self._prove_all(self.flat_options.prefix_sharing, *models)
        if planned is not None and planned.prefix_sharing and not self.flat_check.prefix_sharing:
            raise UnprovenModelError(
                f"{type(self.flat_base(model)).__name__} cannot share prefixes, which was found out after the first "
                "batches had been laid out: set `prefix_sharing=False`."
            )

    def flat_base(self, model: Any) -> PreTrainedModel:
        """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
        model = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        return model.get_base_model() if is_peft_model(model) else model

    @property
    def method(self) -> str:
        """How batches are computed, in words."""
        if self.flat_check is None:
            return "TRL, with padding"
        sharing = "shared prefixes" if self.flat_check.prefix_sharing else "no shared prefixes"
        return f"padding-free ({self.flat_check.route.backend}, {sharing})"

    def total_counts(self) -> BatchCounts:
        """What was computed in training so far, on all processes. With TRL's padding, `distinct` is 0: not known."""
        counts = torch.tensor([(self.batch_counts + self.new_counts).as_tuple()], device=self.accelerator.device)
        total = BatchCounts(*self.accelerator.gather(counts).sum(0).tolist())
        if self.flat_options is None:  # TRL counts the real tokens of padded batches
            total = replace(total, real=self._total_train_tokens)  # type: ignore[attr-defined]
        return total

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:  # a checkpoint that is written anew is not whole until it is whole again
            state_file(self.args.output_dir, self.state.global_step).unlink(missing_ok=True)
        super()._save_checkpoint(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The trainer state, written next, says that a checkpoint is whole: what other processes write is part of it
        self.accelerator.wait_for_everyone()

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.unproven:
            self.prove_placed(model)
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        if self.part_weight == 1:
            return loss
        return (self.part_weight * loss[0], *loss[1:]) if isinstance(loss, tuple) else self.part_weight * loss

    def count(self, inputs: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        if self.flat_options is None:
            slots = inputs["input_ids"].numel()
            self.new_counts += BatchCounts(slots, 0, slots, 0)
        else:
            computed = sum(part["flat_batch"].counts.computed for part in parts)
            self.new_counts += replace(inputs["flat_batch"].counts, computed=computed)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.flat_options is not None and self.model.training and "loss" in logs:
            logs.update(self._flat_figures())
        super().log(logs, *args, **kwargs)

    def _flat_figures(self) -> dict[str, float]:
        """Figures since the last log, summed over all processes; the peak memory of the process that uses most."""
        seconds = time.perf_counter() - self.logged_at
        counts = torch.tensor([self.new_counts.as_tuple()], device=self.accelerator.device)
        computed, real, padded, _ = self.accelerator.gather(counts).sum(0).tolist()
        memory = torch.tensor([peak_memory(self.accelerator.device)[1]], device=self.accelerator.device)
        self.batch_counts += self.new_counts
        self.new_counts, self.logged_at = BatchCounts(), time.perf_counter()
        if not real:
            return {}
        return {
            "flat/computed_tokens": computed,
            "flat/saved_by_padding_free": 1 - real / padded,
            "flat/saved_by_sharing": 1 - computed / real,
            "flat/tokens_per_second": real / seconds,
            "flat/peak_memory_gib": self.accelerator.gather(memory).max().item(),
        }

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        flat, tags = self.flat_options is not None, [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "padding-free"] if flat else tags)
        if flat and self.is_world_process_zero():
            counts = self.batch_counts + self.new_counts
            share = counts.computed / max(counts.padded, 1)
            describe_method(Path(self.args.output_dir) / "README.md", self.method, share)
