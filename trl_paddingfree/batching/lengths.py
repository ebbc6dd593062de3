"""How long examples are, and what they cost to compute."""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from pyarrow.compute import list_value_length


def token_lengths(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """`(examples, columns)` int64: number of tokens in each column of a data set."""
    tables = dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=10_000)
    lengths = [np.stack([list_value_length(table[c]).to_numpy() for c in columns], 1) for table in tables]
    return np.concatenate(lengths).astype(np.int64)


def pair_lengths(dataset: Dataset, chosen: str, rejected: str) -> np.ndarray:
    """
    Lengths of what two sequences start alike with, and of the rest of each.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared pairs.
        chosen (`str`), rejected (`str`):
            Columns of token ids.

    Returns:
        `np.ndarray` of shape `(examples, 3)`, int64: as for prompt, chosen and rejected completion.
    """
    rows = []
    for pair in dataset.with_format("numpy", columns=[chosen, rejected]):
        a, b = pair[chosen], pair[rejected]
        n = min(len(a), len(b))
        different = np.flatnonzero(a[:n] != b[:n])
        alike = int(different[0]) if len(different) else n
        rows.append((alike, len(a) - alike, len(b) - alike))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def truncated(lengths: np.ndarray, max_length: int | None, truncation_mode: str) -> np.ndarray:
    """
    Lengths of preference pairs after truncation.

    Args:
        lengths (`np.ndarray` of shape `(examples, 3)`, int64):
            Tokens of prompt, chosen and rejected sequence of each pair.
        max_length (`int`, *optional*):
            Most tokens of prompt and chosen, and of prompt and rejected sequence.
        truncation_mode (`str`):
            `"keep_start"` or `"keep_end"`. The latter leaves the two rows of a long pair different parts of the prompt,
            unless they are equally long: their lengths are given as those of two sequences without a prompt.
    """
    if max_length is None:
        return lengths
    prompt, chosen, rejected = lengths.T
    if truncation_mode == "keep_start":
        prompt = np.minimum(prompt, max_length)
        return np.stack([prompt, *(np.minimum(x, max_length - prompt) for x in (chosen, rejected))], 1)
    rows = np.minimum(prompt[:, None] + lengths[:, 1:], max_length)
    apart = np.concatenate([np.zeros_like(rows[:, :1]), rows], 1)
    completion = np.minimum(chosen, max_length)
    together = np.stack([rows[:, 0] - completion, completion, completion], 1)
    cut = (prompt + np.maximum(chosen, rejected) > max_length)[:, None]
    return np.where(cut, np.where((chosen == rejected)[:, None], together, apart), lengths)


def example_tokens(lengths: np.ndarray, prefix_sharing: bool) -> np.ndarray:
    """
    Tokens to compute of each example.

    Args:
        lengths (`np.ndarray` of shape `(examples, 3)` or `(examples, 1)`, int64):
            Tokens of prompt, chosen and rejected sequence of each pair; or of each row.
        prefix_sharing (`bool`):
            Whether a pair's prompt is computed once, all but its last token.

    Returns:
        `np.ndarray` of shape `(examples,)`, int64.
    """
    if lengths.shape[1] == 1:
        return lengths[:, 0]
    prompt, chosen, rejected = lengths.T
    inherited = np.maximum(prompt - 1, 0) if prefix_sharing else 0
    return 2 * prompt + chosen + rejected - inherited


def example_work(lengths: np.ndarray, prefix_sharing: bool, hidden_size: int) -> np.ndarray:
    """
    Work of each example, in units of one token through the linear layers.

    A transformer layer has about `12 h^2` weights, `24 h^2` operations per token; causal attention of a sequence of `n`
    tokens adds `2 h n^2`, so `n^2 / 12 h` in these units (Kaplan et al., 2020, table 1).

    Args:
        lengths (`np.ndarray`), prefix_sharing (`bool`):
            As for [`example_tokens`].
        hidden_size (`int`):
            `h`.
    """
    if lengths.shape[1] == 1:
        squares = lengths[:, 0] ** 2
    else:
        prompt, chosen, rejected = lengths.T
        inherited = prompt**2 if prefix_sharing else 0
        squares = (prompt + chosen) ** 2 + (prompt + rejected) ** 2 - inherited
    return example_tokens(lengths, prefix_sharing) + squares / (12 * hidden_size)
