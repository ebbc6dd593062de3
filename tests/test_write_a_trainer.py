"""The page on trainers of one's own: its examples run from a file outside the package, and follow padded rows."""

import importlib.util
import random
import sys

import numpy as np
import pytest
from trl.experimental.tpo import TPOConfig, TPOTrainer

from tests.helpers.pages import ROOT, blocks, short_and_local
from tests.helpers.tiny import SEED, SHARING, arguments, make_model, preference_data, prompts, text
from tests.runs import assert_same, compare, make_trainer, run
from trl_paddingfree.cli.savings import measure
from trl_paddingfree.core.data.lengths import example_tokens, truncated
from trl_paddingfree.core.trainers.composed import CollatedTrainer

pytestmark = pytest.mark.usefixtures("checkout_stays")

LOSS, ROWS, GENERATED = blocks((ROOT / "docs" / "write_a_trainer.md").read_text(encoding="utf-8"), "python")
TRIPLES = "your-name/triples"


def triples(n):
    """Pairs, and a reference answer to each prompt; one has all three alike."""
    rng = random.Random(SEED)

    def reference(row, index):
        return {"reference": row["chosen"] if index == 2 else [{"role": "assistant", "content": text(rng, 1, 20)}]}

    return preference_data(n, SEED).map(reference, with_indices=True)


def own_file(example, folder):
    """What a file defines that holds an example up to where it trains."""
    (folder / "own_trainer.py").write_text(example.split("\ntrainer = ")[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_trainer", folder / "own_trainer.py")
    sys.modules["own_trainer"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """What the examples define."""
    examples = {"loss": LOSS, "rows": ROWS, "generated": GENERATED}
    files = [own_file(example, tmp_path_factory.mktemp(name)) for name, example in examples.items()]
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.parametrize("example", [LOSS, ROWS, GENERATED], ids=["loss", "rows", "generated"])
def test_the_pages_examples_train(example, monkeypatch, tmp_path, model_dir):
    data = {"trl-lib/ultrafeedback_binarized": preference_data(8, SEED), TRIPLES: triples(8)}
    data["trl-lib/ultrafeedback-prompt"] = prompts(8, SEED)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: data[name])
    names = own_file(example, tmp_path)
    training = "trainer = " + example.split("\ntrainer = ")[1]
    exec(short_and_local(training, {"Qwen/Qwen3-0.6B": model_dir, "Qwen/Qwen3-4B": model_dir}, tmp_path / "out"), names)
    assert names["trainer"].state.global_step == 1
    assert names["trainer"].method == "padding-free (segment, shared prefixes)"


def own_classes(own, name):
    """A trainer of the page and its configuration."""
    return {"trainer_class": own[f"{name}Trainer"], "config_class": own[f"{name}Config"]}


@pytest.mark.parametrize("reference", ["lora", "model"])
def test_the_own_loss_follows_padded_rows(own, reference):
    data = preference_data(12, SEED)
    options = {"train_dataset": data, "eval_dataset": data.select(range(3)), "eval_strategy": "steps", "eval_steps": 2}
    options["trainer_class"] = own["LengthRegularizedDPOTrainer"]
    padded, ours = (
        run("dpo", "ours", **arguments("dpo", reference == "lora"), **options, padding_free=is_ours)
        for is_ours in (False, True)
    )
    assert_same(padded, ours)
    counts = ours.trainer.total_counts()
    assert counts.computed < counts.real < counts.padded


@pytest.mark.parametrize(
    ("options", "ours_only"),
    [
        ({}, {}),
        ({"loss_type": "tpo-l", "tpo_alpha": 0.0}, {}),
        ({"max_length": 15, "gradient_checkpointing": False}, {"prefix_sharing": False}),
        ({"tpo_alpha": 0.0, "max_length": 24}, {"max_tokens_per_micro_batch": 80, "arrange_micro_batches": "tokens"}),
        ({"tpo_alpha": 0.0}, {"memory_budget": 0.8}),
        ({}, {"max_tokens_per_micro_batch": 60}),  # its loss reads logits of all rows
    ],
    ids=["three-answers", "simpo", "flat", "parts", "budget", "slices"],
)
def test_the_own_rows_follow_padded_trl(own, tokenizer, options, ours_only):
    # All examples share each step: those that share a micro-batch may be others than TRL's
    options = {"per_device_train_batch_size": 12, "beta": 0.5, "steps": 2, **options}
    options |= {"train_dataset": triples(12), "processing_class": tokenizer}
    theirs = {"trainer_class": TPOTrainer, "config_class": TPOConfig}
    padded = run("dpo", "padded", **theirs, model=make_model(), **options)
    ours = run("dpo", "ours", **own_classes(own, "PaddingFreeTPO"), model=make_model(), **options, **ours_only)
    assert_same(padded, ours)
    ours = ours.trainer
    assert ours.runtime.route.prefix_sharing == ours_only.get("prefix_sharing", True)
    if ours.runtime.route.prefix_sharing:  # a prompt is there once for its answers
        assert ours.total_counts().computed < 0.8 * ours.total_counts().real


@pytest.mark.parametrize("limit", [None, 40], ids=["whole", "parts"])
def test_the_own_trainer_that_generates_follows_padded_trl(own, limit):
    data = prompts(8, SEED).select([i for i in range(8) for _ in range(2)])
    only_ours = {**own_classes(own, "FlatDistillation"), "max_tokens_per_micro_batch": limit}
    options = {"beta": 0.5, "gradient_accumulation_steps": 2, "shuffle_dataset": False}
    ours = compare("distillation", lambda: arguments("distillation"), data, "ours", ours=only_ours, **options).ours
    counts = ours.trainer.total_counts()
    assert counts.computed < counts.padded


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@SHARING
def test_predicted_tokens_of_three_answers_are_those_of_the_batch(own, mode, prefix_sharing):
    names = own["TPO"].token_columns
    collator = own["TripleCollator"](0, 20, mode, padding_free=True, prefix_sharing=prefix_sharing)
    for lengths in np.random.default_rng(SEED).integers(1, 20, (60, 4)):
        # tokens that occur once, so that only the prompt is shared
        ids = np.split(np.arange(1, 1 + lengths.sum()), np.cumsum(lengths)[:3])
        example = {name: x.tolist() for name, x in zip(names, ids, strict=True)}
        computed = collator([example])["flat_batch"].counts.computed
        (predicted,) = example_tokens(truncated(lengths[None], 20, mode), prefix_sharing)
        # Two answers of three that are cut alike may share what is left of the prompt, which is not foreseen
        assert predicted == computed if mode == "keep_start" or not prefix_sharing else predicted >= computed


def test_what_the_own_trainer_cannot_do_is_refused_by_its_names(own, tokenizer):
    def build(**options):
        given = {"model": make_model(), "train_dataset": triples(4), "processing_class": tokenizer}
        make_trainer("dpo", "ours", **own_classes(own, "PaddingFreeTPO"), **given, **options)

    with pytest.raises(ValueError, match=r"`arrange_micro_batches='tokens'` changes .* `tpo_alpha=1.0`"):
        build(arrange_micro_batches="tokens")
    with pytest.raises(ValueError, match="is less than example"):
        build(max_tokens_per_micro_batch=1, flat_attention="mask", tpo_alpha=0.0)
    with pytest.raises(ValueError, match="derives from TRL's .*, or from `own_trainer.TripleCollator`"):
        build(data_collator=lambda examples: examples)
    with pytest.raises(ValueError, match="The task 'tpo' has no `prepare`"):
        measure(triples(4), tokenizer, own["TPO"], [2])


def test_a_loss_that_says_nothing_of_sizes_runs_in_slices_beneath_it(own, passes):
    silent = type("Silent", (own["LengthRegularizedDPOTrainer"],), {"part_sizes": CollatedTrainer.part_sizes})
    padded, ours = (
        run("dpo", "ours", trainer_class=silent, train_dataset=preference_data(12, SEED), **options)
        for options in ({"padding_free": False}, {"max_tokens_per_micro_batch": 60})
    )
    assert_same(padded, ours)
    assert all(each.schedule.num_slices > 1 for each in passes)
