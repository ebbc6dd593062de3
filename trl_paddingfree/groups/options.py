"""The option of groups of processes."""

from dataclasses import dataclass, field


@dataclass
class Options:
    """Fields of [`~trl_paddingfree.PaddingFreeOptions`]."""

    sequence_parallel_size: int = field(
        default=1,
        metadata={
            "help": "How many processes compute each micro-batch together, each a slice of its tokens, so that rows "
            "may be that many times longer. Has to divide the processes; `per_device_train_batch_size` then counts for "
            "each group of them. DPO and SFT only."
        },
    )
