"""Groups of processes of which each computes a slice of one flat batch: `sequence_parallel_size`.

All processes of a group get the same examples, and compute the same loss. accelerate and transformers know such groups
from tensor parallelism: their data loaders give a group the same batches, and `get_tp_size` is its size.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..images.examples import has_images
from ..model.restored import attributes_set
from ..model.sequence import SequenceGroup
from .configs import Arguments

if TYPE_CHECKING:
    from .runtime import Runtime

# The dimensions of a mesh along which accelerate's data loaders give processes different batches, and the same
_DIFFERENT, _SAME = "dp_replicate", "tp"


def refuse_ungrouped(trainer_class: Any, flat: "Runtime", arguments: Arguments) -> None:
    """Refuse arguments of a trainer that cannot be combined with groups of processes, if its options ask for any."""
    if (size := flat.options.sequence_parallel_size) == 1:
        return
    config, option = arguments["args"], f"`sequence_parallel_size={size}`"
    if not trainer_class.takes_sequence_parallel or flat.pads:
        what = "padded rows" if flat.pads else f"{trainer_class.trl_trainer.__name__}'s batches"
        raise ValueError(
            f"{option}: DPO and SFT compute slices of flat batches, and no other trainer. Leave it out for {what}."
        )
    if has_images(arguments.get("train_dataset")):
        raise ValueError(f"{option}: images are not computed in slices. Leave it out, or remove the images.")
    if config.world_size % size:
        raise ValueError(
            f"{option} does not divide the {config.world_size} processes of this run: launch a multiple of it "
            "(`accelerate launch --num_processes`, on CPUs `torchrun --nproc_per_node`), or set it to a divisor."
        )
    logits = "it wants logits of all tokens in one place"
    apart = "it gives each process examples of its own"
    for name, is_set, reason in (
        *((name, arguments.get(name), logits) for name in ("compute_metrics", "compute_loss_func")),
        *((name, vars(config)[name], logits) for name in ("label_smoothing_factor", "eval_use_gather_object")),
        ("train_sampling_strategy='batch_rebalance'", config.train_sampling_strategy == "batch_rebalance", apart),
        ("auto_find_batch_size", config.auto_find_batch_size, "a process would begin again while others wait"),
        ("torch_compile=True", config.torch_compile, "what processes exchange is not compiled"),
    ):
        if is_set:
            raise ValueError(f"{option} cannot be combined with `{name}`: {reason}. Leave one of them out.")


def form_group(accelerator: Any, size: int) -> SequenceGroup:
    """The group of `size` processes that this process is in, whose data loaders give all of them the same batches."""
    is_fsdp1 = accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2
    if is_fsdp1 or accelerator.parallelism_config is not None:
        name = "`fsdp_version=1`" if is_fsdp1 else "`parallelism_config`"
        raise ValueError(
            f"`sequence_parallel_size={size}` forms groups under DDP, FSDP2 and DeepSpeed ZeRO, and not with {name}: "
            "launch with another configuration."
        )
    shape = accelerator.num_processes // size, size
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=(_DIFFERENT, _SAME))
    # Data loaders alone get to see the mesh: engines go on to shard and average over all processes
    accelerator.prepare_data_loader = partial(_with_mesh, accelerator, accelerator.prepare_data_loader, mesh)
    # With one entry per example, what accelerate has added to fill the last batch is cut off as without groups
    accelerator.gather = partial(_of_each_group, accelerator.gather, size)
    return SequenceGroup(mesh[_SAME].get_group(), accelerator.device)


def _with_mesh(accelerator: Any, prepare: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """What `prepare` makes of a data loader: one that gives all processes of a group the same batches."""
    with attributes_set([(accelerator.state, "device_mesh", mesh)]):
        return prepare(*args, **kwargs)


def _of_each_group(gather: Any, size: int, tensors: Any) -> Any:
    """What `gather` gives, of one process of each group."""
    processes = torch.distributed.get_world_size()
    return recursively_apply(lambda x: x.unflatten(0, (processes, -1))[::size].flatten(0, 1), gather(tensors))
