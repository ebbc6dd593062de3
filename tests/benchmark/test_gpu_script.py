"""The script for a GPU, without one: each command that it would run is one that can be run."""

import json
import os
import sys

import pytest

from scripts.benchmark.__main__ import make_parser
from scripts.benchmark.rows import read_lengths
from scripts.benchmark.tasks import BENCHMARKED
from tests.helpers.launching import finished
from tests.helpers.pages import ROOT

RECORDING = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def commands(folder, **variables):
    """What the script has Python do, for some steps."""
    python, record = folder / "bin" / "python3", folder / "record"
    python.parent.mkdir()
    python.write_text(RECORDING)
    python.chmod(0o755)
    command = [ROOT / "scripts" / "gpu.sh", folder / "results", folder / "results.tar.gz"]
    variables |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "RECORD": str(record)}
    result = finished(command, 120, **variables)
    assert (folder / "results" / "log.txt").read_text().strip() in result.stdout
    assert (folder / "results.tar.gz").stat().st_size > 0
    return [json.loads(line) for line in record.read_text().splitlines()]


def test_every_command_of_the_gpu_script_can_be_run(tmp_path):
    ran = commands(tmp_path, EIGHT="tiny")
    benchmarks = [argv[2:] for argv in ran if argv[:2] == ["-m", "scripts.benchmark"]]
    names = []
    for argv in benchmarks:
        options = make_parser().parse_args(argv)
        assert tmp_path / "results" in (options.output, options.parts)
        names.append(options.name)
        if options.task is not None:
            assert {*(options.methods or ())} <= {method.name for method in BENCHMARKED[options.task].methods}
            assert all(len(read_lengths(source, options.task)[1]) >= 512 for source in options.lengths)
    assert len(set(names)) == len(names) == 8, "one result would take the place of another"
    assert sum("tiny" in argv for argv in benchmarks) > 4
    tests = [argv for argv in ran if argv[:2] == ["-m", "pytest"]]
    files = [part for argv in tests for part in argv if part.startswith("tests/")]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert "tests/test_gpu.py" in files


def test_steps_can_be_chosen_and_wheels_come_first(tmp_path):
    ran = commands(tmp_path, STEPS="4", WHEELS=str(tmp_path / "wheels"))
    assert ran[0][:3] == ["-m", "pip", "install"]
    assert "--no-index" in ran[0]
    assert [argv[2:] for argv in ran if argv[:2] == ["-m", "scripts.benchmark"]] == [
        ["--parts", str(tmp_path / "results")]
    ]


def test_no_step_begins_without_time_for_it(tmp_path):
    with pytest.raises(AssertionError, match="no time left for: python3 -m scripts.benchmark dpo"):
        commands(tmp_path, SECONDS_FOR_ALL="10")
