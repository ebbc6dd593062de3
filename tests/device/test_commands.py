"""The commands, the quick start and the benchmark on the pretend device."""

import json

import pytest

from scripts.benchmark import run
from scripts.benchmark.__main__ import main as bench
from tests.helpers.reference_flash import varlen_on
from trl_paddingfree.cli.main import main
from trl_paddingfree.core.device import GIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_tries_the_routes_of_the_device(dtype, device, model_dir, capsys):
    with varlen_on(device.type):
        assert main(["check", model_dir, "--dtype", dtype, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == str(device)
    tried = {route["backend"] for route in report["routes"] if route["results"]}
    assert tried == {"segment", "mask", *(["varlen"] if dtype == "bfloat16" else [])}
    assert all(result["passed"] for route in report["routes"] for result in route["results"])
    assert report["chosen"]["backend"] == ("varlen" if dtype == "bfloat16" else "segment")


def test_the_quick_start_trains_both_ways_in_the_memory_of_the_device(tmp_path, capsys):
    sizes = ["--steps", "2", "--sft_steps", "1", "--batch_size", "4", "--max_length", "64"]
    assert main(["quickstart", *sizes, "--output_dir", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"]
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size / GIB
    for memory in result[
        "peak_memory_gib"
    ].values():  # gradients and the optimizer's moments, at least; not of a process
        assert 3 * weights < memory < 50 * weights


def test_the_benchmark_measures_what_is_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "matmul_rate", lambda *args: 1.0)  # products of the sizes that a GPU takes
    arguments = ["sft", "--model", "tiny", "--lengths", "uniform:6-40", "--max-length", "64", "--batch-size", "4"]
    arguments += ["--batches", "1", "--rounds", "1", "--methods", "trl", "shared", "--output", str(tmp_path)]
    assert bench(arguments) == 0
    (measured,) = json.loads((tmp_path / "sft.json").read_text())["runs"]
    assert measured["agree"]
    assert all(method["bytes_above"] > 0 for method in measured["methods"].values())
