"""The option that forms groups of processes."""

from dataclasses import dataclass

from ..core.trainers.options import CoreOptions, option


@dataclass
class Options(CoreOptions):
    """What the options of the trainers have for them."""

    sequence_parallel_size: int = option(
        1,
        "How many processes compute each micro-batch together, each a slice of its tokens, so that rows may be that "
        "many times longer. It must divide the number of processes, and `per_device_train_batch_size` then applies to "
        "each group of them. DPO and SFT only.",
    )
