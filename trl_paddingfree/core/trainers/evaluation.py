"""How batches count in evaluation."""

from typing import Any

from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..flat.batch import Inputs

logger = logging.get_logger(__name__)


def weigh_last_batch(trainer: Any, inputs: Inputs) -> None:
    """
    Weight the last batch of an evaluation stream by its number of rows. accelerate knows that number if it dispatches
    batches, as it does for padded ones unless options or a training stream forbid it. If processes read batches
    themselves, it takes the last one for a full one, as in trainers that generate, whose `inputs` are examples. With
    `dataloader_drop_last=True`, it is full, but transformers does not drop that of a stream.
    """
    accelerator = trainer.accelerator
    loader = accelerator.gradient_state.active_dataloader
    is_last = loader is not None and loader.end_of_dataloader and loader.remainder == -1
    dispatches = trainer.args.accelerator_config.dispatch_batches is not None
    if not is_last or isinstance(inputs, list) or dispatches:
        return
    if trainer.args.dataloader_drop_last and not isinstance(loader.dataset, IterableDataset):
        return
    if trainer.num_streams == 1:
        batch = inputs.get("flat_batch")  # packed documents are one row of TRL's
        loader.remainder = 1 if batch is not None and batch.packed_length else find_batch_size(inputs)
    else:
        logger.warning_once(
            "In evaluation, the last batches of a stream are filled up with its first rows, which then count "
            "twice: figures differ from TRL's, which dispatches padded batches to its processes."
        )
