"""Prompts with several answers, and padded TRL on their pairs: the same pairs in each micro-batch."""

import random
from collections.abc import Callable, Mapping
from itertools import groupby, product
from operator import itemgetter
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl import DPOTrainer, RewardTrainer

from tests.helpers.float64 import TOLERANCE as OF_SHARES
from tests.helpers.float64 import float64_throughout, in_float64
from tests.helpers.tiny import make_model, make_tokenizer, reward_model, text
from tests.runs import Compared, assert_same, run

# float64, relative to the largest entry: only the order of sums differs
TOLERANCE = 1e-10
# Each token is counted once for each of its rows, and steps are not the same share of an epoch; answers that are equal
# have equal rewards but for rounding, which decides which is larger
IGNORED = ("num_tokens", "epoch", "_runtime", "_per_second", "rewards/accuracies")
# Those that TRL divides, or compares, in float32
ROUNDED = ("mean_token_accuracy", "min_reward", "max_reward")


def scored(
    n: int, seed: int, answers: tuple[int, int] = (2, 5), chat: bool = True, words: Callable[..., str] = text
) -> Dataset:
    """Prompts with scored answers of very different lengths: ties, equal and empty answers, some that start alike."""
    rng, rows = random.Random(seed), []
    for _ in range(n):
        prompt, number = words(rng, 1, 15), rng.randint(*answers)
        texts = [" " * (not chat) + words(rng, 1, 20) for _ in range(number)]
        for i in range(1, number):
            edge = rng.choice(["", "", "", "equal", "starts alike", "empty"])
            if edge == "equal":
                texts[i] = texts[rng.randrange(i)]
            elif edge == "starts alike":
                texts[i] = texts[rng.randrange(i)] + " " + texts[i]
            elif edge == "empty":
                texts[i] = ""
        scores = [rng.choice([0, 1, 2.5, 3]) for _ in texts]
        if len({*scores}) == 1:
            scores[0] += 1
        completions: list[Any] = list(texts)
        if chat:
            prompt = [{"role": "user", "content": prompt}]
            completions = [[{"role": "assistant", "content": each}] for each in texts]
        rows.append({"prompt": prompt, "completions": completions, "scores": [float(x) for x in scores]})
    return Dataset.from_list(rows)


def listed(value: Any) -> list[Any]:
    """The answers in a value of `chosen` or `rejected`."""
    is_one = isinstance(value, str) or isinstance(value[0], dict)
    return [value] if is_one else value


def pairs_of(dataset: Any, answer_pairs: str = "all", min_score_margin: float = 0) -> Dataset:
    """All pairs of scored answers, as TRL reads them, with the number of their prompt; written without our code."""
    pairs = []
    for number, row in enumerate(dataset):
        if "scores" in row:
            scores, answers = row["scores"], row["completions"]
            found = [(i, j) for i, j in product(range(len(scores)), repeat=2) if scores[i] > scores[j]]
            if answer_pairs != "all":
                found = [(i, j) for i, j in found if i == scores.index(max(scores))]
            if answer_pairs == "extremes":
                found = [(i, j) for i, j in found if j == scores.index(min(scores))]
            chosen = [(answers[i], answers[j]) for i, j in found if scores[i] - scores[j] >= min_score_margin]
        else:
            chosen = product(*map(listed, (row["chosen"], row["rejected"])))
        others = {name: value for name, value in row.items() if name not in ("completions", "scores")}
        pairs += [{**others, "chosen": better, "rejected": worse, "of_prompt": number} for better, worse in chosen]
    return Dataset.from_list(pairs)


def in_batches(task: str, size: int) -> type:
    """TRL's trainer, each of whose batches has the pairs of so many prompts, in turn."""

    class InBatches(DPOTrainer if task == "dpo" else RewardTrainer):
        def get_train_dataloader(self):
            return self.loader(self.train_dataset)

        def get_eval_dataloader(self, eval_dataset=None):
            return self.loader(self.eval_dataset if eval_dataset is None else eval_dataset)

        def loader(self, data):
            of_prompts = [
                [*map(itemgetter(0), group)] for _, group in groupby(enumerate(data["of_prompt"]), itemgetter(1))
            ]
            batches = [sum(of_prompts[i : i + size], []) for i in range(0, len(of_prompts), size)]
            read = ("images", "prompt", "chosen", "rejected") if "images" in data.column_names else ("_ids", "_logps")
            data = data.select_columns([x for x in data.column_names if x.endswith(read)])
            return self.accelerator.prepare(DataLoader(data, batch_sampler=batches, collate_fn=self.data_collator))

    return InBatches


def arguments(task: str, **given: Any) -> dict[str, Any]:
    """Fresh models, with a reference unless an adapter gives one, and a tokenizer."""
    if task == "reward":
        return {"model": reward_model(), "processing_class": make_tokenizer(), **given}
    reference = {} if "peft_config" in given else {"ref_model": make_model(seed=5)}
    return {"model": make_model(), **reference, "processing_class": make_tokenizer(), **given}


def compare(
    task: str,
    data: Any,
    make: Callable[..., Mapping[str, Any]] = arguments,
    size: int = 2,
    ours: Mapping[str, Any] | None = None,
    layout: str = "shared",
    **given: Any,
) -> Compared:
    """
    Train padded TRL on the pairs of `data`, and ours on its prompts, `size` of them in a micro-batch; compare all.

    Args:
        make (`Callable`):
            Gives fresh arguments for the trainer, by the task.
        ours (`Mapping[str, Any]`, *optional*):
            What only our trainer is given.
        layout (`str`, *optional*, defaults to `"shared"`):
            That of our run.
        **given:
            What both are given; options that choose pairs, which padded TRL gets chosen.
    """
    chosen = {name: given.pop(name) for name in ("answer_pairs", "min_score_margin") if name in given}
    evaluated = given.pop("eval_dataset", None)
    options = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "train_sampling_strategy": "sequential",
        **given,
    }

    def made():
        return {name: in_float64(x) if isinstance(x, torch.nn.Module) else x for name, x in make(task).items()}

    def datasets(convert):
        return {"train_dataset": convert(data)} | ({"eval_dataset": convert(evaluated)} if evaluated else {})

    with float64_throughout():
        theirs = datasets(lambda each: pairs_of(each, **chosen))
        padded = run(task, "padded", **made(), **theirs, trainer_class=in_batches(task, size), **options)
        given = {**made(), **datasets(lambda each: each), **options, **chosen, **(ours or {})}
        mine = run(task, layout, **given)
    ignored = IGNORED if task == "dpo" else (*IGNORED, "accuracy")
    assert_same(padded, mine, OF_SHARES, ignored)
    assert_same(padded, mine, TOLERANCE, (*ignored, *ROUNDED))
    return Compared(padded, mine)
