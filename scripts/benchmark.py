"""Side by side with TRL, and the tables of results in the documentation.

    python scripts/benchmark.py dpo --model smollm2-135m --lengths lengths.csv --output results
    python scripts/benchmark.py --collators results         # time to collate 64 rows of 4,096 tokens
    python scripts/benchmark.py --arranging lengths/*.csv   # what `arrange_micro_batches` changes
    python scripts/benchmark.py --packing lengths/*.csv     # what packing changes against padding-free batches
    python scripts/benchmark.py --heads reward=pairs.jsonl grpo=prompts.jsonl --model FOLDER  # Reward, KTO and GRPO
    python scripts/benchmark.py --agreement reward=pairs.jsonl --model FOLDER  # TRL's commands and ours: every figure
    python scripts/benchmark.py --vision results            # a small model learns to read pictures
    python scripts/benchmark.py --render results/dpo.json   # write the table and draw the chart again
    python scripts/benchmark.py --readme [--check]          # write the documentation's tables from docs/benchmarks

A length file has the columns prompt,chosen,rejected (dpo) or total,assistant (sft), in tokens.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main(argv: list[str]) -> int:
    """Run one of the commands above."""
    if not argv or not argv[0].startswith("--") or argv[0] == "--help":
        from trl_paddingfree.benchmark import main as benchmark

        return benchmark(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command = parser.add_mutually_exclusive_group(required=True)
    command.add_argument("--collators", type=Path, metavar="FOLDER")
    command.add_argument("--vision", type=Path, metavar="FOLDER")
    command.add_argument("--arranging", nargs="+", metavar="LENGTHS")
    command.add_argument("--packing", nargs="+", metavar="LENGTHS")
    command.add_argument("--heads", nargs="+", metavar="TASK=DATA")
    command.add_argument("--agreement", nargs="+", metavar="TASK=DATA")
    command.add_argument("--render", type=Path, metavar="RESULT")
    command.add_argument("--readme", action="store_true")
    parser.add_argument("--check", action="store_true", help="with --readme: fail if a table is not fresh")
    parser.add_argument(
        "--model", help="with --heads, --agreement: folder of a causal language model and its tokenizer"
    )
    args = parser.parse_args(argv)

    from trl_paddingfree.benchmark import report, tables
    from trl_paddingfree.benchmark.studies import commands
    from trl_paddingfree.cli.agreement import agreement

    if args.readme:
        return tables.update(ROOT, check=args.check)
    if args.render:
        report.write(json.loads(args.render.read_text()), args.render.parent, args.render.stem)
    elif args.collators:
        commands.collators(args.collators)
    elif args.vision:
        commands.vision(args.vision)
    elif args.arranging:
        commands.arranging(args.arranging, ROOT / "docs" / "benchmarks")
    elif args.heads:
        commands.heads(args.model, args.heads, ROOT / "docs" / "benchmarks")
    elif args.agreement:
        agreement(args.model, args.agreement, ROOT / "docs" / "benchmarks")
    else:
        commands.packing(args.packing, ROOT / "docs" / "benchmarks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
