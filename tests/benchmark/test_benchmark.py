"""The benchmark measures what it says: work against brute force, counts against the counter, wrong losses refused."""

import copy
import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.benchmark import baseline, beside, measure, report, tables
from scripts.benchmark.__main__ import BENCHMARKS, main, only_too_large, page
from scripts.benchmark.flops import Work, count_flops
from scripts.benchmark.measure import Runner, interleave
from scripts.benchmark.rows import make_rows, read_lengths
from scripts.benchmark.run import Benchmark, tolerances
from scripts.benchmark.studies import collators, packing
from scripts.benchmark.studies.arranging import measure_imbalance, measure_meetings
from scripts.benchmark.studies.packing import measure_packing
from scripts.benchmark.tasks import BENCHMARKED, Settings
from scripts.benchmark.trainers import make_model
from tests.helpers.reference_flash import varlen_on
from trl_paddingfree import FlatBatch
from trl_paddingfree.budgets.predict import SHAPES

SEEDS = [3, 17]
VOCAB = SHAPES["tiny"]["vocab_size"]
# Counts are integers below 2**53: only the solution of three equations in float64 rounds
COUNT = 1e-9
# The kernel's output, of order one, is rounded to float16
FLOAT16 = 2e-3


def settings(task, **changed):
    defaults = {"model": "tiny", "device": "cpu", "dtype": "float32", "tuning": "lora", "batch_size": 4}
    defaults |= {"max_length": 64, "gradient_checkpointing": False, "learning_rate": 1e-3}
    return Settings(task, **{**defaults, **changed})


@pytest.fixture(scope="module", params=["dpo", "sft"])
def benchmark(request):
    return Benchmark(settings(request.param))


def rows(benchmark, seed=0):
    return make_rows(benchmark.settings.task, "uniform:6-60", vocab_size=VOCAB, max_length=64, seed=seed)


@pytest.fixture
def csv(tmp_path):
    """A function that writes a file of lengths, and gives its path."""

    def write(*rows):
        file = tmp_path / "pairs.csv"
        file.write_text("\n".join(rows) + "\n")
        return str(file)

    return write


def test_rows_are_as_long_as_a_file_of_lengths_says_and_a_pair_has_one_prompt(csv):
    file = csv("prompt,chosen,rejected", "5,3,2", "9,1,40", "16,1,1")
    assert read_lengths(file, "dpo") == ("pairs", [(5, 3, 2), (9, 1, 40), (16, 1, 1)])
    with pytest.raises(ValueError, match=r"sft needs \('total', 'assistant'\)"):
        read_lengths(file, "sft")
    made = make_rows("dpo", file, vocab_size=50, max_length=16).examples
    assert [[len(ids) for ids in example.values()] for example in made] == [[5, 3, 2], [9, 1, 7]]
    shared = make_rows("dpo", "equal:20", vocab_size=50, max_length=64, pairs_per_prompt=2).examples
    assert shared[0]["prompt_ids"] == shared[1]["prompt_ids"] != shared[2]["prompt_ids"]
    row = make_rows("sft", "equal:20", vocab_size=50, max_length=15).examples[0]
    assert row["labels"] == [-100] * 10 + row["input_ids"][10:]
    assert len(row["input_ids"]) == 15


@pytest.mark.parametrize("seed", SEEDS)
def test_the_limit_is_every_distinct_prefix_once(seed):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 12)).tolist() for _ in range(9)]
    batch = FlatBatch.from_rows(sequences, sequences)
    prefixes = {tuple(row[:n]) for row in sequences for n in range(1, len(row) + 1)}
    limit = Work.limit(batch, causal=True)
    assert (limit.tokens, limit.pairs) == (len(prefixes), sum(map(len, prefixes)))
    assert Work.limit(batch).pairs >= limit.pairs
    assert limit.tokens == batch.counts.distinct
    assert limit.tokens <= Work.flat(batch).tokens < limit.tokens + len(sequences)  # one more for each further branch


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_cost_per_unit_of_work_is_what_the_counter_counts(benchmark, seed):
    batch = rows(benchmark, seed).batches(4, seed)[0]
    for runner in benchmark.runners:
        for examples in runner.arrange([batch, batch])[:1]:
            work, flops = runner.count(examples)
            cost = benchmark.cost_of(runner.method.name)
            assert cost.of(work) == pytest.approx(flops, rel=COUNT), runner.method.name


@pytest.mark.slow
def test_a_training_step_costs_what_its_matrices_say():
    cost = Benchmark(settings("dpo", tuning="full", precomputed_reference=True), methods=["trl", "shared"]).cost
    shape = SHAPES["tiny"]
    layers, hidden, inner = shape["num_hidden_layers"], shape["hidden_size"], shape["intermediate_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    linear = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner)
    assert cost.per_token == pytest.approx(6 * linear, rel=COUNT)  # forward, and two gradients
    assert cost.per_pair == pytest.approx(14 * layers * hidden, rel=COUNT)  # two products, and five in the backward
    assert cost.per_scored == pytest.approx(8 * hidden * VOCAB, rel=COUNT)  # TRL's head computes its logits twice


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "sft"])
def test_a_memory_budget_that_holds_everything_costs_what_no_recomputation_costs(task):
    """Up to the gradient of the embeddings, which checkpointing asks for and nothing uses."""
    names = ["trl", "trl-kept", "shared", "budget"]
    benchmark = Benchmark(settings(task, gradient_checkpointing=True), methods=names)
    assert benchmark.run(rows(benchmark), num_batches=1, rounds=1)["agree"]
    two = rows(benchmark).examples[:2]
    (_, padded), (_, kept), (work, _) = (runner.count(two) for runner in benchmark.runners[:3])
    assert kept < padded
    assert benchmark.cost_of("budget").of(work) == pytest.approx(benchmark.model_cost.of(work), rel=0.02)
    assert benchmark.cost_of("budget").of(work) < 0.85 * benchmark.cost_of("shared").of(work)


def test_products_that_add_up_are_counted_in_place_and_out_of_place():
    a, b, total = torch.ones(3, 5), torch.ones(5, 7), torch.zeros(3, 7)
    assert count_flops(lambda: total.addmm_(a, b)) == count_flops(lambda: torch.addmm(total, a, b)) == 2 * 3 * 5 * 7
    assert count_flops(lambda: torch.addmm(total, a, b, out=total)) == 2 * 3 * 5 * 7


def test_each_gradient_of_a_convolution_costs_what_it_costs_itself():
    for groups in (1, 2, 6):
        layer, x = torch.nn.Conv1d(6, 6, 3, groups=groups), torch.ones(2, 6, 9, requires_grad=True)
        once = 2 * 2 * 7 * 6 * (6 // groups) * 3  # rows, places, channels, channels of a group, taps
        assert count_flops(lambda: layer(x)) == once  # noqa: B023
        assert count_flops(lambda: layer(x).sum().backward()) == 3 * once  # noqa: B023
        assert count_flops(lambda: layer(x.detach()).sum().backward()) == 2 * once  # noqa: B023


def trained(benchmark):
    """The sum of the weights that each method trains."""
    models = [runner.trainer.model for runner in benchmark.runners]
    return [sum(float(x.detach().sum()) for x in model.parameters() if x.requires_grad) for model in models]


@pytest.mark.slow
def test_methods_agree_and_are_timed_on_the_same_batches(benchmark):
    before = trained(benchmark)
    result = benchmark.run(rows(benchmark), num_batches=2, rounds=2)
    names = [method.name for method in BENCHMARKED[benchmark.settings.task].methods if not method.is_asked_for]
    assert list(result["methods"]) == names
    assert result["agree"]
    assert all(was != now for was, now in zip(before, trained(benchmark), strict=True)), "the methods do not train"
    for name in result["differences"]:
        method = result["methods"][name]
        assert method["speedup"] > 0
        assert method["useful_mfu"] > 0
        assert set(method["parts"]) == {"data", "forward", "backward", "optimizer"}
    assert result["methods"]["trl"]["speedup"] == 1
    assert result["methods"]["shared"]["flops_over_limit"] < 1.05
    assert result["methods"]["trl"]["flops_over_limit"] > 1.2
    json.dumps(result)


@pytest.mark.slow
def test_a_method_that_computes_something_else_is_flagged_beside_its_times(benchmark, monkeypatch):
    collator = benchmark.runners[-1].collate

    def wrong(examples):
        batch = collator(examples)
        flat = batch["flat_batch"]
        # Other tokens of the first prompt, in its rows too: rows that do not fit their flat batch are refused
        changed = torch.isin(flat.row_index, flat.row_index[0, :2]) & flat.row_mask
        flat.input_ids[0, flat.row_index[0, :2]] += 1
        return {**batch, "input_ids": batch["input_ids"] + changed}

    monkeypatch.setattr(benchmark.runners[-1], "collate", wrong)
    monkeypatch.setattr(benchmark, "_tree_batches", lambda batches: [collator(b)["flat_batch"] for b in batches])
    result = benchmark.run(rows(benchmark), num_batches=1, rounds=1)
    assert not result["agree"]
    differences = result["differences"][benchmark.runners[-1].method.name]
    off = [name for name, value in differences.items() if value > result["allowed"][name]]
    assert off == report.disagreeing(result, "budget") != []
    assert all(method["speedup"] > 0 for method in result["methods"].values())
    flags = [f"({', '.join(off)} DISAGREE)" in report.flag(result, name) for name in result["methods"]]
    assert flags == [name == "budget" for name in result["methods"]]


@pytest.mark.slow
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_method_that_cannot_train_is_left_out_and_named(benchmark, monkeypatch, error):
    def gradients(batch):
        raise error("on purpose")

    (kept,) = (runner for runner in benchmark.runners if runner.method.name == "trl-kept")
    # All else runs on the CPU: only there are methods not tried out before
    monkeypatch.setattr(benchmark, "settings", replace(benchmark.settings, device="an accelerator"))
    monkeypatch.setattr(kept, "gradients", gradients)
    everyone = list(benchmark.runners)
    measured = benchmark.run(rows(benchmark), num_batches=1, rounds=1)
    assert list(measured["methods"]) == [runner.method.name for runner in everyone if runner is not kept]
    assert measured["failed"] == {kept.method.label: f"{error.__name__}: on purpose"}
    assert only_too_large(measured["failed"]) == (error is torch.OutOfMemoryError)
    assert benchmark.runners == everyone


def test_every_batch_goes_to_every_method_before_the_next_in_an_order_that_rotates():
    def recorder(name):
        def step(batch):
            taken.append(f"{batch}{name}")

        return SimpleNamespace(method=SimpleNamespace(name=name), arrange=list, step=step)

    taken = []
    interleave([recorder(name) for name in "abc"], [1, 2], rounds=2)
    assert " ".join(taken) == "1a 1b 1c 2b 2c 2a 1b 1c 1a 2c 2a 2b"


@pytest.mark.slow
def test_packing_trains_on_the_same_rows():
    packing = Benchmark(settings("sft"), methods=["trl", "trl-packing", "flat"])
    batches = rows(packing).batches(4, 0)[:3]
    packed = packing.runners[1].arrange(batches)
    documents = sorted(n for batch in packed for example in batch for n in example["seq_lengths"])
    assert documents == sorted(len(row["input_ids"]) for batch in batches for row in batch)
    assert len(packed) < len(batches)
    for seed in SEEDS:  # the second time, packed steps have led to other weights than padded ones
        measured = packing.run(rows(packing, seed), num_batches=3, rounds=1)
        assert measured["packing_difference"] < tolerances(packing.settings)["loss"]


@pytest.mark.parametrize("window", [None, 3])
def test_unpadded_attention_is_attention_under_the_mask(window):
    torch.manual_seed(0)
    states = [torch.randn(3, heads, 7, 8, dtype=torch.float16) for heads in (4, 2, 2)]
    mask = torch.arange(7) < torch.tensor([7, 2, 5])[:, None]
    rows = [x.transpose(1, 2)[mask].transpose(0, 1)[None] for x in states]
    lengths = {"cu_seq_lens_q": torch.tensor([0, 7, 9, 14], dtype=torch.int32), "max_length_q": 7}
    with varlen_on():
        output, _ = baseline.unpadded_varlen(None, *states, mask, sliding_window=window)
        flat, _ = baseline.unpadded_varlen(None, *rows, None, sliding_window=window, **lengths)
    allowed = mask[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril().triu(1 - (window or 7))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in states), attn_mask=allowed | ~mask[:, None, :, None], enable_gqa=True
    ).transpose(1, 2)
    for found in (output[mask], flat[0]):
        assert (found - expected[mask]).abs().max() < FLOAT16


@pytest.mark.slow
def test_the_command_writes_results_that_name_the_command(tmp_path, capsys):
    arguments = ["dpo", "--model", "tiny", "--lengths", "uniform:6-40", "--max-length", "64", "--batch-size", "2"]
    arguments += ["--batches", "1", "--rounds", "1", "--profile", "--output", str(tmp_path)]
    arguments += ["--methods", "trl", "trl-kept", "flat", "shared"]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "dpo.json").read_text())
    assert result["command"].startswith("python -m scripts.benchmark dpo --model tiny --lengths uniform:6-40")
    assert (tmp_path / "dpo.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "dpo.png").stat().st_size > 10_000
    assert 0 < result["runs"][0]["profile"]["shared"]["gather"] < 1
    assert result["runs"][0]["profile"]["flat"]["gather"] == 0
    padded, shared = (result["runs"][0]["profile"][name]["bytes_above"] for name in ("trl", "shared"))
    assert 0 < shared < padded

    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|", result["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    (tmp_path / "machine").mkdir()
    for name in ("dpo.json", "dpo.png"):
        (tmp_path / name).rename(tmp_path / "machine" / name)
    run = result["runs"][0]
    assert f"{run['methods']['shared']['speedup']:.2f}x" in tables.everything(tmp_path)
    assert "](machine/dpo.png)" in tables.everything(tmp_path)
    assert len(tables.headline(tmp_path).splitlines()) == 2  # none of its rows is here
    run["rows"] = next(rows for task, rows in tables.HEADLINE if task == "dpo")
    (tmp_path / "machine" / "dpo.json").write_text(json.dumps(result))
    _, speed, memory, budget, loss, norm = tables.headline(tmp_path).splitlines()[2].split(" | ")
    assert speed == f"{run['methods']['shared']['speedup']:.1f}x"
    assert re.fullmatch(r"\d+\.\d GB \([1-9]\d?%\)", memory)
    assert budget == ""  # it was not measured
    off = run["differences"]["shared"]
    assert loss == f"{max(off['logps/chosen'], off['logps/rejected']):.0e}"
    assert norm == f"{off['grad_norm']:.0e} |"
    assert "](docs/benchmarks/machine/dpo.md)" in tables.headline(tmp_path)


def test_the_documentation_is_checked_against_the_results(tmp_path):
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    pages = {tmp_path / "README.md": "benchmark", folder / "README.md": "benchmark-tables"}
    pages[tmp_path / "docs" / "moving_here.md"] = "benchmark-choices"
    for written, marker in pages.items():
        written.write_text(f"before\n<!-- {marker}:start -->\nstale\n<!-- {marker}:end -->\nafter\n")
    assert tables.update(tmp_path, check=True) == 1
    assert all("stale" in written.read_text() for written in pages)
    assert tables.update(tmp_path, check=False) == 0
    assert tables.update(tmp_path, check=True) == 0
    for written in pages:
        assert re.fullmatch(r"before\n((?!stale).)*\nafter\n", written.read_text(), re.DOTALL)


def test_the_pages_of_results_say_what_their_figures_say():
    for path in sorted(BENCHMARKS.rglob("*.json")):
        assert path.with_suffix(".md").read_text() == page(json.loads(path.read_text()), path.stem), path


@pytest.fixture
def result():
    """A result of SFT on the CPU."""
    return json.loads((BENCHMARKS / "epyc-2-cores" / "sft.json").read_text())


def test_results_stand_beside_those_of_an_earlier_revision(tmp_path, result):
    folder = tmp_path / "docs" / "benchmarks" / "machine"
    folder.mkdir(parents=True)
    (folder / "sft.json").write_text(json.dumps(result))
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm before"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    methods = result["runs"][0]["methods"]
    methods["shared"]["core_speedup"] *= 0.9
    methods["flat"]["flops"] *= 2
    for name in ("sft", "new"):  # of which the latter was not there before
        (folder / f"{name}.json").write_text(json.dumps(result))
    flat, shared, *others = beside.page(tmp_path, "HEAD").splitlines()[2:]
    assert "| **-10%** |" in shared
    before, after = (float(cell.strip(" %|")) for cell in flat.split(" | ")[-2:])
    assert after == pytest.approx(2 * before, abs=0.02)
    assert others
    assert all("| +0% |" in line and line.startswith("| machine/sft |") for line in others)


@pytest.mark.parametrize("newest", ["a", "b"])
def test_the_readme_shows_the_newest_result(tmp_path, newest, result):
    for machine in "ab":
        (tmp_path / machine).mkdir()
        dated = {**copy.deepcopy(result), "date": "2026-11-21" if machine == newest else "2026-11-20"}
        (tmp_path / machine / "sft.json").write_text(json.dumps(dated))
    assert f"docs/benchmarks/{newest}/sft.md" in tables.headline(tmp_path)
    assert tables.headline(tmp_path).count("SFT, P3") == 1


@pytest.mark.slow
def test_the_script_writes_what_a_study_measured_with_its_command(tmp_path):
    assert main(["--collators", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "collators.json").read_text())
    assert result["command"] == f"python -m scripts.benchmark --collators {tmp_path}"
    assert {"commit", "date", "measured"} <= result.keys()
    assert result["command"] in (tmp_path / "collators.md").read_text()


def test_arranged_micro_batches_have_more_even_work(csv):
    for columns in ("prompt,chosen,rejected", "total,assistant"):
        lengths = np.random.default_rng(SEEDS[0]).lognormal(5, 1, (512, columns.count(",") + 1)).astype(int) + 2
        measured = measure_imbalance(csv(columns, *(",".join(map(str, row)) for row in lengths)), num_processes=4)
        for figure in ("time", "memory"):
            assert 1 <= measured["arranged"][figure] < measured["drawn"][figure]
    measured = measure_imbalance(csv("total,assistant", *["40,20"] * 256), num_processes=4)  # nobody waits
    assert measured["drawn"] == measured["arranged"] == {"time": 1.0, "memory": 1.0}


def test_pairs_of_one_prompt_share_it_when_they_meet(csv):
    """With all pairs in one step, the four of a prompt of 100 tokens meet: 99 of their 880 tokens are computed once."""
    file = csv("prompt,chosen,rejected", *["100,10,10"] * 64)
    measured = measure_meetings(file, step_size=64)
    assert measured["arranged"] == pytest.approx((100 + 8 * 10 + 7) / 880)
    assert measured["arranged"] < measured["drawn"] < 1


def test_packing_makes_fewer_steps_and_cuts_examples(csv):
    """Four rows of 60 tokens and one of 130 that a maximum of 100 cuts: by TRL's strategies, 5, 5 and 4 rows of 100."""
    measured = measure_packing(csv("total,assistant", *["60,20"] * 4, "130,20"), max_length=100, batch_size=1)
    found = {name: [x["steps"], x["lost"], x["cut"]] for name, x in measured["methods"].items()}
    expected = {"padding_free": [5, 30 / 370, 1 / 5], "bfd": [5, 30 / 370], "bfd_split": [5, 0, 1 / 5]}
    expected["wrapped"] = [4, 0, 3 / 5]
    assert found.keys() == expected.keys()
    for name, figures in expected.items():
        assert found[name][: len(figures)] == pytest.approx(figures)
    assert "| `wrapped` | 4 |" in packing.report({"measured": [measured]})


def test_backward_passes_of_all_parts_of_a_micro_batch_count_as_backward(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(measure, "now", lambda device: seconds[0])

    def backward():
        seconds[0] += 3

    accelerator = SimpleNamespace(backward=backward)
    trainer = SimpleNamespace(accelerator=accelerator, get_train_dataloader=lambda: SimpleNamespace(collate_fn=None))
    runner = Runner(None, trainer, SimpleNamespace(device="cpu"), False)
    for _ in range(2):
        seconds[0] += 1
        accelerator.backward()
    assert (runner.clock.seconds["forward"], runner.clock.seconds["backward"]) == (2, 6)


def test_shapes_are_as_large_as_their_names_say():
    millions = {"llama-3-8b": 8030, "llama-3.2-1b": 1236, "qwen2.5-0.5b": 494, "qwen2.5-7b": 7616, "smollm2-135m": 135}
    for name, number in millions.items():
        model = make_model(name, torch.bfloat16, "meta")
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(number, rel=5e-3), name


def test_collators_are_timed_beside_trls():
    measured = collators.measure(length=64, pairs=4, repeats=1)["measured"]
    assert all(one["ms"] > 0 for one in measured)
    text = collators.report({"measured": measured, "environment": {"gpu": "machine"}})
    assert f"| TRL's collator | {measured[0]['ms']:.0f} |" in text


def test_without_anything_shared_the_limit_is_what_a_flat_batch_computes():
    rows, counts = [[1, 2, 3], [4, 5]], {"tokens": 5, "scored": 3}
    batch = FlatBatch.from_rows(rows, rows)
    assert Work.flat(batch) == Work(pairs=9 + 4, **counts)
    assert Work.limit(batch) == Work(pairs=9 + 4, in_rows=5, **counts)
    assert Work.limit(batch, causal=True) == Work(pairs=6 + 3, in_rows=5, **counts)
