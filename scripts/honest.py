"""
Look at each micro-batch of short runs of many model families, in float32, float64 and bfloat16, and print what differs.

```
python scripts/honest.py --steps 8    # about a quarter of an hour on the CPU
```
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TQDM_DISABLE", "1")


def main() -> int:
    """Print a line for each family and dtype, and the sums of each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="how many steps each runs (default: %(default)s)")
    parser.add_argument("--families", nargs="*", help="names of model types (default: all that the tests know)")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float64", "bfloat16"], help="default: %(default)s")
    arguments = parser.parse_args()
    import torch

    from tests.proof.families import FAMILIES, honest

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for dtype in (vars(torch)[name] for name in arguments.dtypes):
        found = []
        for name in arguments.families or FAMILIES:
            with open(os.devnull, "w") as nothing:  # what trainers print of each step
                sys.stdout = nothing
                try:
                    looked = honest(name, dtype, arguments.steps)
                finally:
                    sys.stdout = sys.__stdout__
            print(f"{name}, {dtype}: {looked}", flush=True)
            found.append(looked)
        known = [each for each in found if not isinstance(each, str)]
        looks, doubts = (sum(getattr(each, x) for each in known) for x in ("number", "doubts"))
        largest = max((each.largest_error for each in known), default=0.0)
        failed = len(found) - len(known)
        print(f"{dtype}: {looks} looks, {failed} alarms, {doubts} doubts, largest error {largest:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
