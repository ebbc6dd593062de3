"""What a model card says of the method."""

from pathlib import Path

from .. import __version__

SECTION = """

### Without padding

trl-paddingfree {version} computed the batches: {method}. The losses and gradients are those of TRL's padded batches, of
whose slots it computed {share:.0%}. Cite it as:

```bibtex
@software{{trl_paddingfree,
  title   = {{{{trl-paddingfree: SFT and DPO on TRL without computing a single wasted token}}}},
  version = {{{version}}},
  year    = {{2026}}
}}
```
"""


def describe_method(card: Path, method: str, share: float) -> None:
    """
    Add to a model card how its batches were computed.

    Args:
        card (`Path`):
            The card that TRL wrote.
        method (`str`):
            How batches were computed, in words.
        share (`float`):
            Tokens computed, as a share of the slots of the padded batches.
    """
    card.write_text(card.read_text(encoding="utf-8") + SECTION.format(version=__version__, method=method, share=share))
