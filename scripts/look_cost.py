"""
Measure what a look of `check_steps` costs: how many DPO steps take as long, and how often it may come for 1 %.

```
python scripts/look_cost.py                          # the quick start's model, a minute on the CPU
python scripts/look_cost.py --model FOLDER_OR_NAME   # any other; the data is the quick start's
```
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TQDM_DISABLE", "1")


def main() -> int:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder (default: the quick start's model)")
    parser.add_argument("--steps", type=int, default=6, help="how many steps, the first not counted (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="pairs (default: %(default)s)")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16 on a CPU, too, as always on a GPU")
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_paddingfree import PaddingFreeDPOConfig, PaddingFreeDPOTrainer
    from trl_paddingfree.cli.quickstart.compare import texts
    from trl_paddingfree.cli.quickstart.model import make_model, make_tokenizer, preference_data
    from trl_paddingfree.proof.trainers import Looks

    data, on_cpu = preference_data(), not torch.accelerator.is_available()
    clock = time.process_time if on_cpu else time.perf_counter  # on a CPU, whatever else it computes
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model, reference = (
            AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32) for _ in range(2)
        )
    else:
        tokenizer = make_tokenizer(texts(data))
        model, reference = make_model(tokenizer), make_model(tokenizer)
    looks, steps, look = [0.0], [], Looks.look

    def timed(function, add):
        def call(*args, **kwargs):
            start = clock()
            result = function(*args, **kwargs)
            if not on_cpu:
                torch.accelerator.synchronize()
            add(clock() - start)
            return result

        return call

    def add_look(seconds):
        looks[-1] += seconds

    def add_step(seconds):
        steps.append(seconds)
        looks.append(0.0)

    Looks.look = timed(look, add_look)
    args = PaddingFreeDPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        max_steps=arguments.steps,
        check_steps=1,
        report_to="none",
        bf16=arguments.bf16 or not on_cpu,
        use_cpu=on_cpu,
        gradient_checkpointing=False,
    )
    trainer = PaddingFreeDPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=data.select(range(512)), processing_class=tokenizer
    )
    trainer.training_step = timed(trainer.training_step, add_step)
    trainer.train()
    alone = [step - looked for step, looked in zip(steps[1:], looks[1:], strict=False)]
    look_of, step_of = statistics.median(looks[1 : len(steps)]), statistics.median(alone)
    ratio = look_of / step_of
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, {arguments.batch_size} pairs: a "
        f"step takes {step_of:.2f} s without its optimizer, a look {look_of:.2f} s, as {ratio:.2f} steps: 1 % with "
        f"`check_steps={math.ceil(100 * ratio)}`."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
