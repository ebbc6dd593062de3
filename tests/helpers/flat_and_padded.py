"""One model, flat beside padded: log-probabilities, and the gradient of every parameter."""

import torch

from trl_paddingfree import FlatBatch
from trl_paddingfree.model.flat_model import FlatModel
from trl_paddingfree.model.routes import Route

# float32 on CPU (eps = 1.2e-7), relative to the largest entry: gradients are sums of up to 60 tokens' parts, which can
# cancel to a hundredth of their size. A wrong layout shows in the first or second digit
TOLERANCE = 1e-4
# Some gradients are zero but for rounding (the bias of keys under a softmax): what counts then is the rest of the model
NEGLIGIBLE = 1e-2


def tree(seed: int) -> list[list[int]]:
    """Rows of different lengths that share prefixes in pairs, in threes, and not at all."""
    rng = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(1, 96, (n,), generator=rng).tolist()

    prompt, other = draw(11), draw(4)
    pairs = [prompt + draw(9), other + draw(3), prompt + draw(4), other + draw(13)]
    return [*pairs, pairs[0][:15] + draw(2), draw(2)]


def log_probs_and_gradients(model, **inputs):
    model.zero_grad()
    log_probs = model(**inputs, fused_lm_head=True, use_cache=False).log_probs
    weights = torch.linspace(0.5, 1.5, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)
    (log_probs * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), gradients


def assert_equals_padded(model, route: Route, seed: int, tolerance: float = TOLERANCE) -> None:
    """Log-probabilities and the gradient of every parameter, flat against padded."""
    rows = tree(seed)
    labels = [[-100 if i < 3 else token for i, token in enumerate(row)] for row in rows]
    width = max(map(len, rows))
    padded = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
    }
    expected, expected_gradients = log_probs_and_gradients(model, **padded)
    FlatModel.install(model, route)
    batch = FlatBatch.from_rows(rows, labels, prefix_sharing=route.prefix_sharing)
    assert batch.layout.segments.is_shared == route.prefix_sharing
    actual, gradients = log_probs_and_gradients(model, **padded, flat_batch=batch)
    assert float((actual - expected).abs().max() / expected.abs().max()) < tolerance
    assert_same_gradients(expected_gradients, gradients, tolerance)


def assert_same_gradients(expected_gradients, gradients, tolerance: float = TOLERANCE) -> None:
    """Each parameter's gradient, relative to its largest entry or, where that is next to nothing, to the model's."""
    assert gradients.keys() == expected_gradients.keys()
    scales = {name: gradient.abs().max() for name, gradient in expected_gradients.items()}
    least = NEGLIGIBLE * max(scales.values())
    wrong = {
        name: float((gradients[name] - gradient).abs().max() / scales[name])
        for name, gradient in expected_gradients.items()
        if (gradients[name] - gradient).abs().max() > tolerance * max(scales[name], least)
    }
    assert not wrong
