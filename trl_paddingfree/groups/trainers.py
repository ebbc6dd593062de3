"""What groups of processes add to the trainers: `sequence_parallel_size`."""

from ..core.flat.batch import Inputs
from ..core.model.restored import attributes_set
from ..core.trainers import collated
from ..core.trainers.base import FlatTrainer
from ..core.trainers.configs import Arguments
from ..core.trainers.proving import StartUpCheck
from .check import GroupCheck
from .form import form_group, refuse_ungrouped
from .sequence import SequenceGroup


class Groups(FlatTrainer):
    """Computes each batch on several processes. To transformers, a group of them looks like tensor parallelism."""

    _group: SequenceGroup | None = None  # the processes that compute shares of a batch with this one

    @property
    def _group_size(self) -> int:
        return self.runtime.options.sequence_parallel_size

    def refuse_even_padded(self, arguments: Arguments) -> None:
        super().refuse_even_padded(arguments)
        refuse_ungrouped(type(self), self._group_size, self.runtime.pads, arguments)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._group_size > 1:
            self._group = form_group(self.accelerator, self._group_size)

    def make_check(self) -> StartUpCheck:
        if self._group is None:
            return super().make_check()
        given = self.accelerator, self.runtime.options, self.args, self.proofs(), self.earlier_verdicts()
        return GroupCheck(*given, group=self._group)

    @property
    def num_streams(self) -> int:
        return super().num_streams // self._group_size

    def get_tp_size(self) -> int:
        return super().get_tp_size() * self._group_size

    def _get_num_items_in_batch(self, *args, **kwargs):
        with attributes_set([(self, "get_tp_size", super().get_tp_size)]):  # our `gather` counts each group once
            return super()._get_num_items_in_batch(*args, **kwargs)

    def floating_point_ops(self, inputs: Inputs) -> int:
        is_counted = self._group is None or self._group.rank == 0  # transformers sums over all processes
        return super().floating_point_ops(inputs) if is_counted else 0


class GroupsCollated(Groups, collated.Collated):
    """For trainers with a collator."""

    def refuse_options(self) -> None:
        for kind, length in self.runtime.rotary_limits().items() if self._group is not None else ():
            if self._group is not None and self.exceeds(length):
                raise ValueError(self._group.too_long(kind, length))
        super().refuse_options()


class GroupsOnline(Groups):
    """For trainers that generate their rows."""


Collated = GroupsCollated
Online = GroupsOnline
