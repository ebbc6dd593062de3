"""
Predict how much memory several GPUs need to compute a long flat batch together, and how much they send each other, for
the table of docs/sequence_parallel.md.
"""

from trl_paddingfree.budgets.predict import BYTES, features_of, model_config, training_needs
from trl_paddingfree.core.device import GIB

MODEL = "llama-3-8b"
TOKENS, GPUS = (65536, 131072, 262144, 524288), (1, 2, 4, 8)
# The share of the prompt in the tokens of a pair, which is not scored
PROMPT = 2 / 3


def peak_gib(needs, tokens: int, size: int) -> float:
    """GiB at the peak, every layer recomputed, of the process that scores most: all of its slice may be answers."""
    scored = min(tokens / size, tokens * (1 - PROMPT))
    return needs.peaks(features_of(tokens / size, tokens / size, scored))[-1] / GIB


def sent_gib(config, tokens: int, size: int) -> float:
    """GiB that a process sends in a step of DPO. It has four passes: policy, recomputation, backward, reference."""
    heads, keys = config.num_attention_heads, max(config.num_key_value_heads, size)
    head_size = config.hidden_size // heads
    per_layer = tokens / size * 2 * (heads + keys) * head_size * BYTES * (size - 1) / size
    return 4 * config.num_hidden_layers * per_layer / GIB


def main() -> None:
    config = model_config(MODEL)
    needs = training_needs(config, "lora", 1)
    gpus = "".join(f" {n} GPU{'s' * (n > 1)} |" for n in GPUS)
    print(f"| flat tokens |{gpus} sent by each of {GPUS[-1]} |")
    print("|-:|" + "-:|" * (len(GPUS) + 1))
    for tokens in TOKENS:
        peaks = "".join(f" {peak_gib(needs, tokens, size):.0f} |" for size in GPUS)
        print(f"| {tokens:,} |{peaks} {sent_gib(config, tokens, GPUS[-1]):.0f} |")


if __name__ == "__main__":
    main()
