"""One model, flat beside padded: log-probabilities, and the gradient of every parameter."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations.neftune import neftune_post_forward_hook

from tests.helpers.architectures import with_head
from tests.helpers.float64 import TOLERANCE, float64_throughout, in_float64
from tests.runs import gradient_differences, largest_of
from trl_paddingfree import FlatBatch
from trl_paddingfree.core.model.flat_model import FlatModel
from trl_paddingfree.core.model.routes import Route, choose_route


def install(model, **route) -> FlatModel:
    """Has a model compute flat batches."""
    return FlatModel.install(model, choose_route(model, **route))


def flat_model(model, **route) -> FlatModel:
    """The same of a model that gets TRL's fused head."""
    return install(with_head(model), **route)


def noise_of(model) -> list[torch.Tensor]:
    """Has NEFTune add noise to embeddings, and gives a list that gets it."""
    embeddings, seen = model.get_input_embeddings(), []
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    embeddings.register_forward_hook(lambda module, args, output: seen.append(output - module.weight[args[0]]))
    return seen


def tree(seed: int) -> list[list[int]]:
    """Rows of different lengths that share prefixes in pairs, in threes, and not at all."""
    rng = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(1, 96, (n,), generator=rng).tolist()

    prompt, other = draw(11), draw(4)
    pairs = [prompt + draw(9), other + draw(3), prompt + draw(4), other + draw(13)]
    return [*pairs, pairs[0][:15] + draw(2), draw(2)]


def padded_rows(rows: list[list[int]], labels: list[list[int]]) -> dict[str, torch.Tensor]:
    """What TRL's trainers give a model: rows that are padded on the right."""
    masks = [[1] * len(row) for row in rows]
    given = {"input_ids": (rows, 0), "attention_mask": (masks, 0), "labels": (labels, -100)}
    return {name: pad_sequence([*map(torch.tensor, x)], True, value) for name, (x, value) in given.items()}


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def log_probs_and_gradients(model, **inputs):
    model.zero_grad()
    log_probs = model(**inputs, fused_lm_head=True, use_cache=False).log_probs
    (log_probs * torch.linspace(0.5, 1.5, log_probs.numel()).to(log_probs).view_as(log_probs)).sum().backward()
    return log_probs.detach(), gradients_of(model)


@float64_throughout()
def assert_equals_padded(model, route: Route, seed: int) -> None:
    """Log-probabilities and the gradient of every parameter, flat against padded, for `model` in float64."""
    in_float64(model)
    rows = tree(seed)
    labels = [[-100 if i < 3 else token for i, token in enumerate(row)] for row in rows]
    padded = padded_rows(rows, labels)
    expected, expected_gradients = log_probs_and_gradients(model, **padded)
    FlatModel.install(model, route)
    batch = FlatBatch.from_rows(rows, labels, prefix_sharing=route.prefix_sharing)
    assert batch.layout.segments.is_shared == route.prefix_sharing
    actual, gradients = log_probs_and_gradients(model, **padded, flat_batch=batch)
    assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCE
    assert_same_gradients(expected_gradients, gradients)


def assert_same_gradients(expected_gradients, gradients) -> None:
    """Each parameter's gradient, relative to its largest entry or, where that is next to nothing, to the model's."""
    off = gradient_differences(expected_gradients, gradients, largest_of(expected_gradients))
    assert not {name: error for name, error in off.items() if error > TOLERANCE}


def assert_padding_on_the_left_changes_nothing(trainer) -> None:
    """A prompt after padding and the same prompt alone have the same log-probabilities."""
    trainer.model.eval()
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [4, 3, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        padded, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)
        alone, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids[:1, 2:], mask[:1, 2:], 2)
    torch.testing.assert_close(padded[:1], alone)
