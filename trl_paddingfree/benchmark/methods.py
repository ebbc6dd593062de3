"""The trainers of the methods that are set side by side: TRL's own, and ours."""

import copy
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback

from .. import upstream
from ..trainers.registry import TRAINERS
from .shapes import make_tokenizer, same_weights
from .tasks import BENCHMARKED, PACKED, BenchmarkTask, Method


@dataclass(frozen=True)
class Settings:
    """
    What all methods of a run have in common.

    Args:
        task (`str`):
            A key of `BENCHMARKED`.
        model (`str`):
            A named shape, or a folder.
        device (`str`):
            `"cpu"` or `"cuda"`.
        dtype (`str`):
            `"float32"` or `"bfloat16"`, of the weights and of what is computed.
        tuning (`str`):
            `"full"`, `"lora"` (r=16 on all linear layers) or `"qlora"`.
        batch_size (`int`):
            Pairs or rows per step.
        max_length (`int`):
            Longest row.
        gradient_checkpointing (`bool`):
            Whether activations are recomputed in the backward pass.
        precomputed_reference (`bool`):
            Whether reference log-probabilities are given with the rows, where there are any.
        liger (`bool`):
            Whether Liger kernels replace the layers' own.
        torch_compile (`bool`):
            Whether the model is compiled.
        learning_rate (`float` or `None`):
            Learning rate. TRL's default, if `None`.
        seed (`int`):
            Seed of the weights, of the rows and of their order.
    """

    task: str
    model: str
    device: str
    dtype: str
    tuning: str
    batch_size: int
    max_length: int
    gradient_checkpointing: bool
    precomputed_reference: bool
    liger: bool
    torch_compile: bool
    learning_rate: float | None
    seed: int

    @property
    def benchmarked(self) -> BenchmarkTask:
        """The task as the benchmark measures it."""
        return BENCHMARKED[self.task]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch has it."""
        return getattr(torch, self.dtype)


def make_trainer(method: Method, base: Any, settings: Settings, attention: str) -> Any:
    """
    The trainer of a method, after one step of its `train()` on a few tokens: all is set up as in real training.

    Args:
        method ([`Method`]):
            The method.
        base ([`~transformers.PreTrainedModel`]):
            The initial weights. Frozen ones are shared between trainers, others copied.
        settings ([`Settings`]):
            What all methods have in common.
        attention (`str`):
            The attention implementation of TRL's own methods.
    """
    ours = TRAINERS[settings.task]
    trainer_class, config_class = (ours, ours.config_class) if method.ours else (ours.trl_trainer, ours.trl_config)
    model = _model(base, settings)
    kwargs: dict[str, Any] = {}
    if not method.ours:
        upstream.set_attn_implementation(model, attention)
    if settings.tuning != "full":
        kwargs["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    elif settings.benchmarked.has_reference and not settings.precomputed_reference:
        kwargs["ref_model"] = same_weights(base)
        if not method.ours:
            upstream.set_attn_implementation(kwargs["ref_model"], attention)
    trainer = trainer_class(
        model=model,
        args=config_class(**{**_options(method, settings), **method.options}),
        train_dataset=_few_tokens(settings),
        processing_class=make_tokenizer(),
        **kwargs,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def _model(base: Any, settings: Settings) -> Any:
    """The policy's model: LoRA leaves the weights alone, so all methods can have the same in memory."""
    return copy.deepcopy(base) if settings.tuning == "full" else same_weights(base)


def _options(method: Method, settings: Settings) -> dict[str, Any]:
    """Options that all configurations have in common."""
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trl_paddingfree_benchmark_"),
        "per_device_train_batch_size": settings.batch_size,
        "max_length": settings.max_length,
        "max_steps": 1,
        "bf16": settings.torch_dtype == torch.bfloat16,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "use_liger_kernel": settings.liger,
        "torch_compile": settings.torch_compile,
        "use_cpu": settings.device == "cpu",
        "seed": settings.seed,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if settings.learning_rate is not None:
        options["learning_rate"] = settings.learning_rate
    if settings.benchmarked.has_reference:
        options["precompute_ref_log_probs"] = settings.precomputed_reference
    # All rows are truncated before
    return options if settings.benchmarked.truncates or method.options == PACKED else options | {"max_length": None}


def _few_tokens(settings: Settings) -> Dataset:
    """A data set to set a trainer up with."""
    return Dataset.from_list([settings.benchmarked.text] * settings.batch_size)
