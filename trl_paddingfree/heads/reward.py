"""Reward models without padding."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from peft import PeftConfig, TaskType
from trl import RewardConfig, RewardTrainer

from ..core import upstream
from ..core.data.collate import RewardCollator
from ..core.data.lengths import tables_of
from ..core.data.task import Task
from ..core.flat.batch import Inputs
from ..core.flat.segments import common_prefix
from ..core.trainers.composed import CollatedTrainer
from ..core.trainers.configs import Arguments, PaddingFreeOptions

REWARD = Task(
    name="reward",
    unit="pairs",
    found_by=(),  # pairs are recognized as DPO's, which wastes and saves as much
    sequences=(("chosen_ids",), ("rejected_ids",)),
    reads=("chosen", "rejected", "margin", "chosen_input_ids", "rejected_input_ids"),
    collator=RewardCollator,
    prepare=upstream.preparation(RewardTrainer, RewardConfig),
)


def pair_lengths(dataset: Dataset, chosen: str, rejected: str) -> np.ndarray:
    """`(examples, 3)` int64: for each pair, tokens of the common prefix and of the rest of each sequence."""
    rows = []
    for table in tables_of(dataset, chosen, rejected, rows=1_000):
        for lists in zip(table[chosen], table[rejected], strict=True):
            a, b = (ids.values.to_numpy() for ids in lists)
            shared = common_prefix(a, b)
            rows.append((shared, len(a) - shared, len(b) - shared))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@dataclass
class PaddingFreeRewardConfig(PaddingFreeOptions, RewardConfig):
    """TRL's [`~trl.RewardConfig`] with the [`PaddingFreeOptions`]."""


class PaddingFreeRewardTrainer(CollatedTrainer, RewardTrainer):
    """
    TRL's [`~trl.RewardTrainer`], computing real tokens only.

    Same arguments, same losses, metrics and gradients. With `padding_free=True`, the model computes each micro-batch as
    one flat row without padding, in which the prompt of a pair appears once, and the head reads the last token of each
    sequence. See [`~trl_paddingfree.core.trainers.base.FlatTrainer`] for what it accepts and refuses.

    >>> from tempfile import mkdtemp
    >>> from datasets import Dataset
    >>> from transformers import AutoModelForSequenceClassification
    >>> from trl_paddingfree import PaddingFreeRewardConfig, PaddingFreeRewardTrainer
    >>> from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer
    >>> dataset = Dataset.from_list([{"prompt": "one two", "chosen": " three", "rejected": " eleven"}] * 4)
    >>> tokenizer = make_tokenizer(["one two three eleven"])
    >>> config = make_model(tokenizer).config
    >>> config.num_labels = 1
    >>> args = PaddingFreeRewardConfig(mkdtemp(), use_cpu=True, bf16=False, report_to="none")
    >>> model = AutoModelForSequenceClassification.from_config(config)  # or the name of one on the hub
    >>> trainer = PaddingFreeRewardTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer)
    >>> trainer.method
    'padding-free (segment, shared prefixes)'
    """

    task = REWARD
    trl_trainer, trl_config = RewardTrainer, RewardConfig
    config_class = PaddingFreeRewardConfig
    extremes = {"min_reward": min, "max_reward": max}
    averaged = ("accuracy", "margin")

    def refuse_arguments(self, arguments: Arguments) -> None:
        super().refuse_arguments(arguments)
        peft_config = arguments.get("peft_config")
        if isinstance(peft_config, PeftConfig) and peft_config.task_type == TaskType.CAUSAL_LM:
            raise ValueError(
                "`peft_config` has `task_type='CAUSAL_LM'`, and a reward model has a classification head: set "
                "`task_type='SEQ_CLS'` (`--lora_task_type SEQ_CLS`), under which PEFT trains the head too."
            )

    def start_flat(self) -> None:
        super().start_flat()
        pads, ends = vars(self.data_collator)["pad_token_id"], self.model.config.get_text_config().pad_token_id
        if pads != ends:
            raise ValueError(
                f"`data_collator` pads with token {pads}, and the model finds the end of a padded row by "
                f"`config.pad_token_id={ends}`: set `pad_token_id={ends}` of the collator."
            )

    def part_sizes(self, inputs: Inputs) -> dict[str, int]:
        return dict.fromkeys(("loss", "accuracy", "margin", "mean_reward"), len(inputs["input_ids"]) // 2)

    def example_lengths(self) -> np.ndarray:
        if self.token_columns != self.task.token_columns:  # they say what rows share
            return super().example_lengths()
        return pair_lengths(self.train_dataset, *self.token_columns)
