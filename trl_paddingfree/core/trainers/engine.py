"""What an accelerator says of its engine: whether it shards, so that processes must compute the same passes."""

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DynamoBackend
from peft import PeftModel
from transformers import PreTrainedModel


def zero_stage(accelerator: Accelerator) -> int:
    """The stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.zero_stage


def wants_compiled(accelerator: Accelerator) -> bool:
    """Whether `torch_compile=True` or the launcher asks for compiled code."""
    return accelerator.state.dynamo_plugin.backend != DynamoBackend.NO


def base_of(accelerator: Accelerator, model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    return unwrapped.get_base_model() if isinstance(unwrapped, PeftModel) else unwrapped  # type: ignore


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether recomputing gathers weights from other processes, so that all must recompute equally many layers."""
    return zero_stage(accelerator) == 3 or accelerator.distributed_type == DistributedType.FSDP
