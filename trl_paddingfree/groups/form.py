"""Groups of processes that compute one flat batch together, each a share of it: `sequence_parallel_size`.

All processes of a group get the same examples and compute the same loss. To accelerate and transformers, a group looks
like tensor parallelism: their data loaders give it the same batches, and `get_tp_size` returns its size.
"""

from typing import Any

from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import init_device_mesh

from ..core.data.lengths import has_images
from ..core.model.restored import attributes_set
from ..core.trainers.configs import Arguments
from .sequence import SequenceGroup


def refuse_ungrouped(trainer_class: Any, size: int, pads: bool, arguments: Arguments) -> None:
    """Refuse trainer arguments that cannot be combined with `sequence_parallel_size`, if `size` is above 1."""
    if size == 1:
        return
    config, option = arguments["args"], f"`sequence_parallel_size={size}`"
    if not trainer_class.takes_sequence_parallel or pads:
        what = "padded rows" if pads else f"{trainer_class.trl_trainer.__name__}'s batches"
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
    given = {**vars(config), **arguments}
    wanting_logits = ("compute_metrics", "compute_loss_func", "label_smoothing_factor", "eval_use_gather_object")
    rebalances = "train_sampling_strategy='batch_rebalance'"
    given[rebalances] = config.train_sampling_strategy == "batch_rebalance"
    for name, reason in {
        **dict.fromkeys(wanting_logits, "it wants logits of all tokens in one place"),
        rebalances: "it gives each process examples of its own",
        "auto_find_batch_size": "a process would begin again while others wait",
        "torch_compile": "what processes exchange is not compiled",
    }.items():
        if given.get(name):
            raise ValueError(f"{option} cannot be combined with `{name}`: {reason}. Leave one of them out.")


def form_group(accelerator: Any, size: int) -> SequenceGroup:
    """Form this process's group of `size` processes, to all of which data loaders then give the same batches."""
    is_fsdp1 = accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2
    if is_fsdp1 or accelerator.parallelism_config is not None:
        name = "`fsdp_version=1`" if is_fsdp1 else "`parallelism_config`"
        raise ValueError(
            f"`sequence_parallel_size={size}` forms groups under DDP, FSDP2 and DeepSpeed ZeRO, and not with {name}: "
            "launch with another configuration."
        )
    shape = accelerator.num_processes // size, size
    # Along the first dimension, accelerate's data loaders give different batches; along the second, the same
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "tp"))
    prepare, gather = accelerator.prepare_data_loader, accelerator.gather

    def prepare_with_mesh(*args, **kwargs):
        # Only data loaders see the mesh: engines still shard and average over all processes
        with attributes_set([(accelerator.state, "device_mesh", mesh)]):
            return prepare(*args, **kwargs)

    def of_one_process(x):
        return x.unflatten(0, (accelerator.num_processes, -1))[::size].flatten(0, 1)  # the first of each group

    accelerator.prepare_data_loader = prepare_with_mesh
    # One entry per example: accelerate cuts off what it added to fill the last batch, as without groups
    accelerator.gather = lambda tensors: recursively_apply(of_one_process, gather(tensors))
    return SequenceGroup(mesh["tp"].get_group(), accelerator.device)
