"""What an engine that shards weights or gradients makes of passes: all processes compute some of them together."""

from accelerate import Accelerator, DistributedType


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a recomputation gathers weights from other processes, so that all must recompute as many layers."""
    plugin = accelerator.state.deepspeed_plugin
    is_zero3 = accelerator.distributed_type == DistributedType.DEEPSPEED and plugin.zero_stage == 3
    return is_zero3 or accelerator.distributed_type == DistributedType.FSDP


def adds_up_shards(accelerator: Accelerator) -> bool:
    """Whether each backward pass adds shards of gradients up: FSDP's do, but where its first version offloads them."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return False
    plugin = accelerator.state.fsdp_plugin
    return plugin.fsdp_version > 1 or not plugin.cpu_offload.offload_params
