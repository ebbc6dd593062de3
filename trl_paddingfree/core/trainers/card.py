"""What a model card says of how batches were computed."""

from pathlib import Path

from ... import __version__
from ..flat.counts import BatchCounts

# Appended to TRL's model card
MODEL_CARD = """

### Without padding

trl-paddingfree {version} computed the batches: {method}. The losses and gradients are those of TRL's padded
batches{share}. Cite it as:

```bibtex
@software{{trl_paddingfree,
  title   = {{{{trl-paddingfree: padding-free and prefix-shared training on TRL}}}},
  version = {{{version}}},
  year    = {{2026}}
}}
```
"""


def without_padding(method: str, computed: BatchCounts) -> str:
    """What a model card says of how batches were computed, and of what share of the padded slots."""
    share = f", and it computed {computed.computed / computed.padded:.0%} of their slots" if computed.padded else ""
    return MODEL_CARD.format(version=__version__, method=method, share=share)


def append_to_card(output_dir: str, text: str) -> None:
    """Append a text to the model card."""
    with (Path(output_dir) / "README.md").open("a", encoding="utf-8") as card:
        card.write(text)
