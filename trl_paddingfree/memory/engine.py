"""Which engines shard weights or gradients, so that processes must compute the same passes."""

import torch
from accelerate import Accelerator, DistributedType
from peft import PeftModel
from transformers import PreTrainedModel


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether recomputing gathers weights from other processes, so that all must recompute equally many layers."""
    plugin = accelerator.state.deepspeed_plugin
    is_zero3 = accelerator.distributed_type == DistributedType.DEEPSPEED and plugin.zero_stage == 3
    return is_zero3 or accelerator.distributed_type == DistributedType.FSDP


def adds_up_shards(accelerator: Accelerator) -> bool:
    """Whether each backward pass reduces and adds up gradient shards: FSDP, except FSDP1 with parameter offload."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return False
    plugin = accelerator.state.fsdp_plugin
    return plugin.fsdp_version > 1 or not plugin.cpu_offload.offload_params


def base_of(accelerator: Accelerator, model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model under the wrappers of PEFT, DDP, DeepSpeed and torch.compile."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    return unwrapped.get_base_model() if isinstance(unwrapped, PeftModel) else unwrapped  # type: ignore
