"""Groups of processes of which each computes a slice of one flat batch: `sequence_parallel_size`.

All processes of a group get the same examples, and compute the same loss. accelerate and transformers know such groups
from tensor parallelism: their data loaders give a group the same batches, and `get_tp_size` is its size.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..flat.batch import Inputs
from ..images.examples import has_images
from ..model.restored import attributes_set
from ..model.sequence import SequenceGroup
from .checkpoints import ResumableTrainer
from .configs import Arguments

# The dimensions of a mesh along which accelerate's data loaders give processes different batches, and the same
_DIFFERENT, _SAME = "dp_replicate", "tp"


class GroupedTrainer(ResumableTrainer):
    """A trainer whose processes form groups of `sequence_parallel_size`, each of which computes one batch together."""

    takes_sequence_parallel: ClassVar[bool] = False  # whether groups may compute the batches of this trainer
    trl_trainer: type
    group: SequenceGroup | None = None

    @property
    def group_size(self) -> int:
        """How many processes get the same batch to compute."""
        return self.flat.options.sequence_parallel_size

    def refuse_ungrouped(self, arguments: Arguments) -> None:
        """Refuse arguments that cannot be combined with groups of processes, if there are to be any."""
        size, config = self.group_size, arguments["args"]
        if size == 1:
            return
        option = f"`sequence_parallel_size={size}`"
        if not self.takes_sequence_parallel or self.flat.pads:
            what = "padded rows" if self.flat.pads else f"{self.trl_trainer.__name__}'s batches"
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

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.group_size == 1:
            return
        accelerator = self.accelerator
        is_fsdp1 = accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2
        if is_fsdp1 or accelerator.parallelism_config is not None:
            name = "`fsdp_version=1`" if is_fsdp1 else "`parallelism_config`"
            raise ValueError(
                f"`sequence_parallel_size={self.group_size}` forms groups under DDP, FSDP2 and DeepSpeed ZeRO, and not "
                f"with {name}: launch with another configuration."
            )
        shape = accelerator.num_processes // self.group_size, self.group_size
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=(_DIFFERENT, _SAME))
        self.group = SequenceGroup(mesh[_SAME].get_group(), accelerator.device)
        # Data loaders alone get to see the mesh: engines go on to shard and average over all processes
        accelerator.prepare_data_loader = partial(_with_mesh, accelerator, accelerator.prepare_data_loader, mesh)
        # With one entry per example, what accelerate has added to fill the last batch is cut off as without groups
        accelerator.gather = partial(_of_each_group, accelerator.gather, self.group_size)

    def get_tp_size(self) -> int:
        return super().get_tp_size() * self.group_size

    def _get_num_items_in_batch(self, *args, **kwargs):
        with attributes_set([(self, "get_tp_size", super().get_tp_size)]):  # `gather` has counted each group once
            return super()._get_num_items_in_batch(*args, **kwargs)

    def largest_of_group(self, value: int) -> int:
        """The largest `value` of all processes of the group."""
        return value if self.group is None else int(self.group.largest([value])[0])

    def floating_point_ops(self, inputs: Inputs) -> int:
        is_counted = self.group is None or self.group.rank == 0  # transformers sums over all processes
        return super().floating_point_ops(inputs) if is_counted else 0


def _with_mesh(accelerator: Any, prepare: Any, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """What `prepare` makes of a data loader: one that gives all processes of a group the same batches."""
    with attributes_set([(accelerator.state, "device_mesh", mesh)]):
        return prepare(*args, **kwargs)


def _of_each_group(gather: Any, size: int, tensors: Any) -> Any:
    """What `gather` gives, of one process of each group."""
    processes = torch.distributed.get_world_size()
    return recursively_apply(lambda x: x.unflatten(0, (processes, -1))[::size].flatten(0, 1), gather(tensors))
