"""Side by side with TRL, and the table of results in the README.

    python scripts/benchmark.py dpo --model smollm2-135m --lengths lengths.csv --output results
    python scripts/benchmark.py --collators                 # time to collate 64 rows of 4,096 tokens
    python scripts/benchmark.py --chart results/dpo.json    # draw a chart again
    python scripts/benchmark.py --readme [--check]          # write the README's table from docs/benchmarks, or check it

A length file has the columns prompt,chosen,rejected (dpo) or total,assistant (sft), in tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- benchmark:start -->", "<!-- benchmark:end -->"


def results(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All results in the folders of all machines, with their paths."""
    return [
        (str(path.relative_to(folder)), result)
        for path in sorted(folder.glob("*/*.json"))
        if "runs" in (result := json.loads(path.read_text()))
    ]


def table(folder: Path) -> str:
    """The README's table: for every machine and every set of rows, our best against TRL's methods."""
    from trl_paddingfree.benchmark.environment import machine_name
    from trl_paddingfree.benchmark.shapes import display_name

    heads = ["", "rows", "padding-free", "with shared prefixes", "FLOPs", "of the limit's"]
    lines = ["| " + " | ".join(heads) + " |", "|-|-|-:|-:|-:|-:|"]
    for path, result in results(folder):
        settings = result["settings"]
        for run in result["runs"]:
            methods = run["methods"]
            where = (
                f"[{machine_name(result['environment'])}, {display_name(settings['model'])}](docs/benchmarks/{path})"
            )
            flops = methods["shared"]["flops"] / methods["trl"]["flops"]
            lines.append(
                f"| {where} | {settings['task'].upper()}, {run['rows']}, batch {run['batch_size']} "
                f"| {methods['flat']['speedup']:.2f}x | {methods['shared']['speedup']:.2f}x "
                f"| {flops:.0%} | {methods['shared']['flops_over_limit']:.1%} |"
            )
    return "\n".join(lines)


def with_table(readme: str, content: str) -> str:
    """The README with `content` between the markers."""
    if START not in readme or END not in readme:
        raise ValueError(f"README.md needs the lines {START} and {END}, between which the table goes.")
    before, rest = readme.split(START, 1)
    return f"{before}{START}\n{content}\n{END}{rest.split(END, 1)[1]}"


def update_readme(check: bool) -> int:
    """Write the table into the README, or fail if it is not what the results say."""
    path = ROOT / "README.md"
    current = path.read_text()
    updated = with_table(current, table(ROOT / "docs" / "benchmarks"))
    if check and updated != current:
        print("README.md is not what docs/benchmarks says: run `python scripts/benchmark.py --readme`.")
        return 1
    path.write_text(updated)
    return 0


def draw(path: Path) -> int:
    """Draw the chart of a result again."""
    from trl_paddingfree.benchmark.chart import chart
    from trl_paddingfree.benchmark.report import conditions

    result = json.loads(path.read_text())
    chart(result, path.with_suffix(".png"), conditions(result))
    return 0


def main(args: list[str]) -> int:
    """Run one of the commands above."""
    if "--readme" in args:
        return update_readme("--check" in args)
    if "--chart" in args:
        return draw(Path(args[args.index("--chart") + 1]))
    if "--collators" in args:
        from trl_paddingfree.benchmark.collators import time_collators

        print(json.dumps(time_collators(), indent=1))
        return 0
    from trl_paddingfree.benchmark import main as benchmark

    return benchmark(args)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
