"""Side by side with TRL, and the tables of results in the README.

    python scripts/benchmark.py dpo --model smollm2-135m --lengths lengths.csv --output results
    python scripts/benchmark.py --collators results         # time to collate 64 rows of 4,096 tokens
    python scripts/benchmark.py --arranging lengths/*.csv   # what `arrange_micro_batches` changes
    python scripts/benchmark.py --packing lengths/*.csv     # what packing changes against padding-free batches
    python scripts/benchmark.py --render results/dpo.json   # write the table and draw the chart again
    python scripts/benchmark.py --readme [--check]          # write the README's tables from docs/benchmarks

A length file has the columns prompt,chosen,rejected (dpo) or total,assistant (sft), in tokens.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- benchmark:start -->", "<!-- benchmark:end -->"


def results(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All results in the folders of all machines, with their paths, plain ones before their variants."""
    return [
        (str(path.relative_to(folder)), result)
        for path in sorted(folder.glob("*/*.json"), key=lambda path: path.with_suffix(""))
        if "runs" in (result := json.loads(path.read_text()))
    ]


def speedup(method: dict[str, Any], result: dict[str, Any]) -> str:
    """A speed-up; on a CPU also the one in core time, which other processes on the machine do not disturb."""
    if "speedup" not in method:
        return "losses disagree"
    core = "" if "gpu" in result["environment"] else f" ({method['core_speedup']:.2f}x)"
    return f"{method['speedup']:.2f}x{core}"


def table(folder: Path, crossover: bool) -> list[str]:
    """The claim, or the rows where there is little to gain, as a table."""
    from trl_paddingfree.benchmark.environment import machine_name
    from trl_paddingfree.benchmark.shapes import display_name

    heads = ["machine, model", "rows", "padding-free", "with shared prefixes", "FLOPs", "FLOPs / limit"]
    lines = ["| " + " | ".join(heads) + " |", "|-|-|-:|-:|-:|-:|"]
    for path, result in results(folder):
        if Path(path).name.startswith("crossover") != crossover:
            continue
        settings = result["settings"]
        machine = f"{machine_name(result['environment'])}, {display_name(settings['model'])}"
        reference = ", precomputed reference" if settings["precomputed_reference"] else ""
        for run in result["runs"]:
            methods = run["methods"]
            ours = methods["shared" if "shared" in methods else "flat"]
            cells = [
                f"[{machine}](docs/benchmarks/{Path(path).with_suffix('.md')})",
                f"{settings['task'].upper()}, {run['rows']}, batch {run['batch_size']}{reference}",
                speedup(methods["flat"], result) if "flat" in methods else "",
                speedup(methods["shared"], result) if "shared" in methods else "",
                f"{ours['flops'] / methods['trl']['flops']:.0%}",
                f"{ours['flops_over_limit']:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def chart(folder: Path) -> list[str]:
    """The chart of the first result that has one."""
    drawn = (path for path, _ in results(folder) if not Path(path).name.startswith("crossover"))
    charts = (Path(path).with_suffix(".png") for path in drawn if (folder / path).with_suffix(".png").exists())
    return (
        [f"![Speed-up over padded TRL](docs/benchmarks/{path.as_posix()})", ""] if (path := next(charts, None)) else []
    )


def content(folder: Path) -> str:
    """What the README says of the results."""
    return "\n".join(
        [
            "Examples per second relative to padded TRL in the same run (in brackets, on CPUs: in core time), and "
            "floating-point operations relative to padded TRL's and to the fewest possible.",
            "",
            *table(folder, crossover=False),
            "",
            *chart(folder),
            "Where there is little to gain, or something to lose: equal rows, few rows, models that are host-bound.",
            "",
            *table(folder, crossover=True),
        ]
    )


def with_table(readme: str, generated: str) -> str:
    """The README with `generated` between the markers."""
    if START not in readme or END not in readme:
        raise ValueError(f"README.md needs the lines {START} and {END}, between which the tables go.")
    before, rest = readme.split(START, 1)
    return f"{before}{START}\n{generated}\n{END}{rest.split(END, 1)[1]}"


def update_readme(check: bool) -> int:
    """Write the tables into the READMEs of all languages, or fail if one is not what the results say."""
    generated, stale = content(ROOT / "docs" / "benchmarks"), False
    for path in sorted(ROOT.glob("README*.md")):
        current = path.read_text(encoding="utf-8")
        updated = with_table(current, generated)
        if check and updated != current:
            print(f"{path.name} is not what docs/benchmarks says: run `python scripts/benchmark.py --readme`.")
            stale = True
        elif not check:
            path.write_text(updated, encoding="utf-8")
    return int(stale)


def render(path: Path) -> int:
    """Write the table of a result and draw its chart again."""
    from trl_paddingfree.benchmark.report import write

    write(json.loads(path.read_text()), path.parent, path.stem)
    return 0


def arranging(sources: list[str]) -> int:
    """Write what arranging micro-batches changes on some lengths."""
    from trl_paddingfree.benchmark.arranging import arranging_report, measure_imbalance, measure_meetings
    from trl_paddingfree.benchmark.rows import task_of

    imbalances = [measure_imbalance(source, processes) for source in sources for processes in (2, 8)]
    pairs = [source for source in sources if task_of(source) == "dpo"]
    meetings = [measure_meetings(source, step_size) for source in pairs for step_size in (32, 128)]
    command = "python scripts/benchmark.py --arranging " + shlex.join(sources)
    result = {"command": command, "imbalances": imbalances, "meetings": meetings}
    return write_report("arranging", result, arranging_report(imbalances, meetings))


def packing(sources: list[str]) -> int:
    """Write what packing changes on some lengths."""
    from trl_paddingfree.benchmark.packing import measure_packing, packing_report

    measured = [measure_packing(source) for source in sources]
    command = "python scripts/benchmark.py --packing " + shlex.join(sources)
    return write_report("packing", {"command": command, "measured": measured}, packing_report(measured))


def collators(folder: Path) -> int:
    """Write how long collators take on this machine."""
    from trl_paddingfree.benchmark.collators import collators_report, time_collators
    from trl_paddingfree.benchmark.environment import environment, machine_name

    found, command = environment("cpu"), f"python scripts/benchmark.py --collators {folder}"
    measured = time_collators()
    result = {"command": command, "environment": found, "measured": measured}
    return write_report("collators", result, collators_report(measured, machine_name(found)), folder)


def write_report(name: str, result: dict[str, Any], report: str, folder: Path = ROOT / "docs" / "benchmarks") -> int:
    """Write NAME.json, and NAME.md with the command, into a folder: by default that of what depends on no machine."""
    report = f"{report}\n\n```\n{result['command']}\n```\n"
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(report)
    print(report)
    return 0


def main(args: list[str]) -> int:
    """Run one of the commands above."""
    if "--readme" in args:
        return update_readme("--check" in args)
    if "--render" in args:
        return render(Path(args[args.index("--render") + 1]))
    if "--arranging" in args:
        return arranging(args[args.index("--arranging") + 1 :])
    if "--packing" in args:
        return packing(args[args.index("--packing") + 1 :])
    if "--collators" in args:
        return collators(Path(args[args.index("--collators") + 1]))
    from trl_paddingfree.benchmark import main as benchmark

    return benchmark(args)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
