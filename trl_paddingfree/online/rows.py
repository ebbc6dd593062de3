"""Rows that a model generates, and stand-ins for those that it has yet to generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch

from ..core.data.lengths import Example
from ..core.flat.batch import IGNORE_INDEX, FlatBatch, Inputs
from ..padded import row_starts


def generated_on_host(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """
    Copy generated rows, each tensor `(R, L)` int64, to the host. Their prompts are padded on the left and their
    completions on the right. Refuses a completion without a prompt.
    """
    # One copy instead of three, as each waits for the device
    ids, mask, targets = torch.stack([input_ids, attention_mask.long(), labels]).cpu()
    starts = row_starts(mask)
    without_prompt = (starts > 0) & (targets.gather(1, starts[:, None])[:, 0] != IGNORE_INDEX)
    if without_prompt.any():
        raise ValueError(
            f"Row {int(without_prompt.int().argmax())} has a completion and no prompt: TRL would predict its first "
            "token from padding. Leave out empty prompts, or set `padding_free=False`."
        )
    return ids, mask, targets


@dataclass
class PromptGroups:
    """Collator for completions not yet generated, taken to be of full length and to differ from the first token on."""

    prefix_sharing: bool = True
    num_generations: int = 8
    max_completion_length: int = 256

    def __call__(self, examples: list[Example]) -> Inputs:
        return {"flat_batch": self.flatten([example["prompt_ids"] for example in examples])}

    def flatten(self, prompts: Sequence[Sequence[int]]) -> FlatBatch:
        """The flat batch of `prompts`, each with its stand-in completions."""
        tokens = count(2**40)  # beyond any vocabulary
        rows = [
            [*prompt, *islice(tokens, self.max_completion_length)]
            for prompt in prompts
            for _ in range(self.num_generations)
        ]
        unscored = [[IGNORE_INDEX] * len(row) for row in rows]
        return FlatBatch.from_rows(rows, unscored, prefix_sharing=self.prefix_sharing)
