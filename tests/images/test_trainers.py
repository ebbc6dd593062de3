"""Data with images: padded TRL beside ours, on fourteen architectures, and what is refused."""

import pickle
import warnings
from dataclasses import is_dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data._utils.pin_memory import pin_memory
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from scripts.vision_table import refused_model
from tests.core.trainers.test_edits import editing, fewer_scored, more_scored, stepping
from tests.helpers.pages import ROOT
from tests.helpers.tiny import SEED
from tests.helpers.vision import (
    BUILDABLE,
    SAMPLE,
    VISION_DATA,
    make_vision,
    on_images,
    on_vision_data,
    vision_completions,
    vision_messages,
    vision_pairs,
)
from tests.runs import assert_same, compare, make_trainer, run
from trl_paddingfree import PaddingFreeDPOTrainer
from trl_paddingfree.budgets import trainers as within
from trl_paddingfree.core.model.edits import EditedRowsError
from trl_paddingfree.images import check as check_vision
from trl_paddingfree.images.check import check_images
from trl_paddingfree.images.collate import (
    CollatedImageRows,
    VisionPreferenceCollator,
    example_cuts,
    of_images,
    vision_collator,
)
from trl_paddingfree.images.examples import first_with_images, images_of, inverted
from trl_paddingfree.images.model import rules_of_all, vision_rules, why_no_images
from trl_paddingfree.images.rows import FlatImages
from trl_paddingfree.registry import TRAINERS

# bfloat16 keeps 8 bits of each figure; losses are means over many tokens, so that a part of the rounding cancels
BF16 = 2e-2


def assert_architecture(kind):
    compare("dpo", partial(on_images, kind, "dpo"), vision_pairs(8, SEED))
    compare("sft", partial(on_images, kind, "sft", lora=True), vision_messages(8, SEED), "shared")


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)


@pytest.mark.models
@pytest.mark.parametrize("kind", BUILDABLE)
def test_every_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)
    compare("sft", partial(on_images, kind, "sft"), vision_completions(8, SEED), gradient_checkpointing=True)


def test_lora_gradient_checkpointing_evaluation_and_parts():
    """Rows without images among them, a reference without adapter, and micro-batches in parts."""
    dataset = vision_pairs(12, SEED)
    options = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 1}
    options["eval_dataset"] = vision_pairs(6, SEED + 1)
    parts = {"max_tokens_per_micro_batch": 60}
    make = partial(on_images, "llava", "dpo", lora=True)
    computed = [
        compare("dpo", make, dataset, layout, **options, ours=parts).ours.trainer.total_counts().computed
        for layout in ("shared", "flat")
    ]
    assert computed[0] < computed[1]


@pytest.mark.parametrize("engine", [None, "FSDP"])
def test_parts_with_images_come_last_and_not_beside_others_under_fsdp(engine, monkeypatch):
    """DDP waits in the last part for gradients of the tower, and FSDP in each."""
    options = {"max_tokens_per_micro_batch": 1, "per_device_train_batch_size": 8}
    options["train_sampling_strategy"] = "sequential"
    trainer = make_trainer("dpo", "shared", **on_vision_data("dpo"), **options)
    inputs = next(iter(trainer.get_train_dataloader()))
    if engine is None:
        has_images = [FlatImages.of(part.inputs["flat_batch"]) is not None for part in trainer.parts_of(inputs, False)]
        assert has_images == sorted(has_images)
        assert len(set(has_images)) == 2
        return
    monkeypatch.setattr(within, "is_sharded", lambda accelerator: True)
    monkeypatch.setattr(within, "of_all_processes", lambda values, _: torch.tensor([values] * 2))
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="parts with images and parts without"):
        trainer.parts_of(inputs, False)


def test_images_with_which_no_prefix_can_be_shared_are_said_to_be_so(monkeypatch, caplog):
    def check(model, route, reference):
        found = check_images(model, route, reference)
        return replace(found, failure="off") if route.prefix_sharing else found

    monkeypatch.setattr(check_vision, "check_images", check)
    trainer = make_trainer("dpo", "shared", **on_vision_data("dpo"))
    assert not trainer.runtime.route.prefix_sharing
    assert "trains without shared prefixes: with the images of this data, they are inexact" in caplog.text
    assert "in all, with the data's images, as far as it was compared: gradients were compared on text" in caplog.text


def test_bf16_follows_padded_training():
    dataset = vision_completions(8, SEED)
    padded, shared = (
        run("sft", layout, **on_images("gemma3", "sft"), train_dataset=dataset, bf16=True)
        for layout in ("padded", "shared")
    )
    for expected, actual in zip(padded.losses, shared.losses, strict=True):
        assert abs(expected - actual) <= BF16 * abs(expected)


def test_text_on_a_vision_model():
    rows = [{"prompt": "w1 w2", "completion": " w3"}, {"prompt": "w1", "completion": " w4 w5 w6"}] * 4
    compare("sft", partial(on_images, "gemma3", "sft"), Dataset.from_list(rows), "shared")


def test_whole_batches_without_images():
    """Every second batch: the tower is not called, and gets no gradients."""
    rows = [*vision_completions(8, SEED)]
    rows = [{**row, "images": []} if i // 4 % 2 else row for i, row in enumerate(rows)]
    options = {"train_sampling_strategy": "sequential"}
    compare("sft", partial(on_images, "llava", "sft"), Dataset.from_list(rows), "shared", **options)


# --- each image once -------------------------------------------------------------------------------------------------


def images_embedded(task, layout, data, calls, lora=False):
    """How many images LLaVA's tower computes in the last so many calls of the models, after the check."""
    with patch.object(torch.nn.Conv2d, "forward", autospec=True, side_effect=torch.nn.Conv2d.forward) as embed:
        run(task, layout, **on_images("llava", task, lora), train_dataset=data, steps=1)
        return [call.args[1].size(0) for call in embed.call_args_list][-calls:]


@pytest.mark.parametrize("task", ["dpo", "sft", "kto"])
def test_equal_images_are_computed_once(task):
    """The fourth example has the first one's image. KTO calls policy and reference on mismatched rows, too."""
    rows = VISION_DATA[task](4, SEED)
    calls, copies = {"dpo": (2, 2), "sft": (1, 1), "kto": (4, 1)}[task]
    assert [len(row["images"]) for row in rows] == [1, 2, 0, 1]
    assert images_embedded(task, "padded", rows, calls) == [4 * copies] * calls
    assert images_embedded(task, "shared", rows, calls) == [3] * calls


def test_rounding_of_examples_with_images_is_no_mistake():
    """With these weights and examples, one padded run has less noise than the flat one."""
    (model, processor), (reference, _) = (make_vision("llava", 52005 + seed) for seed in (0, 1))
    given = {"model": model, "ref_model": reference, "processing_class": processor, "max_length": None, "steps": 1}
    run("dpo", "shared", **given, train_dataset=vision_pairs(6, 52005))  # which asserts that prefixes are shared


@pytest.mark.parametrize("kind", SAMPLE)
def test_images_are_processed_once_and_cut_into_parts(kind):
    model, processor = make_vision(kind, seed=SEED)
    rows = [{**row, "images": row["images"][:1]} for row in vision_pairs(24, SEED)]
    if kind == "llava_onevision":  # its processor leaves rows without images out of its counts: those are not cut
        rows = [row for row in rows if row["images"]]
    rows = rows[:6]
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=vision_rules(model), keeps_rows=True)
    images = []
    process = type(processor.image_processor).__call__

    def counting(self, given, *args, **kwargs):
        images.extend(image for of_row in given for image in (of_row if isinstance(of_row, list) else [of_row]))
        return process(self, given, *args, **kwargs)

    with patch.object(type(processor.image_processor), "__call__", counting):
        whole = collator(rows)["rows"]
        parts = [whole.take(examples, collator).with_flat(collator) for examples in ([0, 3], [1, 2, 4], [5])]
    assert len(images) == sum(len(row["images"]) for row in rows)  # cut, and not processed again
    assert sum(len(part["input_ids"]) for part in parts) == 2 * len(rows)
    owners = [4, 0, 2]  # of different images
    cut = whole.take(owners, collator).rows
    for name, expected in of_images(collator.rows([rows[i] for i in owners])).items():
        if expected.shape == cut[name].shape:  # else the others are larger, and it is padded to their size
            assert torch.equal(expected, cut[name])


# Pixels, images and image tokens of each row, and the entries of each row
CUTS = [
    (torch.arange(2.0)[:, None], [1, 1], [4, 4], [1, 1]),
    (torch.arange(2.0)[:, None], [2, 0], [8, 0], None),  # two images, or two examples
    (torch.arange(2.0)[:, None], [0, 0], [4, 4], [1, 1]),  # are in the examples where none is found
    (torch.arange(2.0)[:, None], [0, 0, 0], [4, 4, 0], None),
    # Two images of three tiles and one, and two rows without
    (torch.arange(4.0).view(4, 1, 1, 1), [1, 1, 0, 0], [12, 4, 0, 0], [3, 1, 0, 0]),
    (torch.arange(4.0).view(4, 1, 1, 1), [1, 1, 0, 0], [11, 4, 0, 0], None),
    (torch.zeros(4, 1, 1, 1, 1), [1, 1, 0, 0], [4] * 4, [1] * 4),
]


def test_images_are_processed_again_where_nothing_tells_whose_they_are():
    for pixels, images, tokens, entries in CUTS:
        found = example_cuts({"pixel_values": pixels}, images, tokens)
        assert found == (None if entries is None else {"pixel_values": entries})
    pairs = CollatedImageRows({"input_ids": torch.arange(4)[:, None]}, 2, [{}, {}], [0, 1], {})
    assert pairs.take([1], None).rows["input_ids"].tolist() == [[1], [3]]


def test_images_are_found_where_trl_reads_them():
    def said(**part):
        return {"images": [], "messages": [{"role": "user", "content": [part, {"type": "text", "text": "w1"}]}]}

    by_address = [said(type="image_url", image_url=given) for given in ({"url": "a.png"}, "b.png")]
    assert list(map(images_of, by_address)) == [["a.png"], ["b.png"]]
    assert images_of(said(type="image", path="c.png", image_url=None)) == ["c.png"]
    assert images_of({"image": "read", "images": ["not read"]}) == ["read"]


def test_images_in_files_train_as_those_in_memory(tmp_path):
    rows = []
    for row in vision_completions(8, SEED):
        paths = [str(tmp_path / f"{len(rows)} {i}.png") for i in range(len(row["images"]))]
        for path, image in zip(paths, row["images"], strict=True):
            image.save(path)
        rows.append({**row, "images": paths})
    compare("sft", partial(on_images, "llava", "sft"), Dataset.from_list(rows), "shared")


def test_workers_send_no_processor():
    model, processor = make_vision("llava", seed=SEED)
    options = {"padding_free": True, "keeps_rows": True, "rules": vision_rules(model)}
    collator = VisionPreferenceCollator(processor, **options)
    rows = collator([*vision_pairs(4, SEED)])["rows"]
    assert [b"Processor" in pickle.dumps(each) for each in (collator, rows)] == [True, False]


def tensors_of(value):
    """All tensors within a batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    held = vars(value).values() if is_dataclass(value) else held
    return [tensor for each in held for tensor in tensors_of(each)]


def test_a_batch_is_pinned_with_all_that_it_knows_of_its_images(monkeypatch):
    """By a stand-in, as pages are locked for accelerators only."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args: pinned.append(self.clone()) or pinned[-1])
    model, processor = make_vision("gemma3", seed=SEED)
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=vision_rules(model))
    batch = collator([*vision_pairs(6, SEED)])
    rows = tensors_of({name: value for name, value in batch.items() if name != "flat_batch"})
    found = pin_memory(batch)
    assert FlatImages.of(batch["flat_batch"]) is not None
    assert len(pinned) == len(rows)  # the flat batch is one buffer of its own
    assert {id(tensor) for tensor in pinned} <= {id(tensor) for tensor in tensors_of(found)}
    flat, expected = (tensors_of(each["flat_batch"]) for each in (found, batch))
    assert all(map(torch.equal, flat, expected))


# --- rows that somebody edits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edits", "limit"),
    [({"edit": fewer_scored}, None), ({"edit": more_scored}, 60), ({"examples": lambda given: given[::-1]}, 60)],
    ids=["fewer scored", "more scored in parts", "other examples in parts"],
)
def test_edits_of_a_collator_are_trained_on(edits, limit):
    given = on_vision_data("dpo")
    padded, ours = (
        {"data_collator": editing(collator, of=given["processing_class"], **edits)}
        for collator in (DataCollatorForVisionPreference, VisionPreferenceCollator)
    )
    expected = run("dpo", "padded", **given, **padded)
    assert_same(expected, run("dpo", "shared", **on_vision_data("dpo"), **ours, max_tokens_per_micro_batch=limit))


def test_values_that_a_collator_adds_stay_with_their_rows(monkeypatch):
    """Equal images are there once, and their rows are not. Pixels that cannot be cut are processed again."""
    model, processor = make_vision("llava", seed=SEED)
    pairs = [next(row for row in vision_pairs(8, SEED) if row["images"])] * 3

    def collated(**more):
        collator = editing(VisionPreferenceCollator, lambda batch: {**batch, **more}, of=processor)
        return collator.changed(padding_free=True, keeps_rows=True, rules=vision_rules(model))(pairs)

    batch = collated(weights=torch.arange(6))
    assert batch["weights"].tolist() == [*range(6)]
    assert batch["rows"].take([1], None).rows["weights"].tolist() == [1, 4]
    monkeypatch.setattr("trl_paddingfree.images.collate.example_cuts", lambda *_: None)
    collated()
    with pytest.raises(EditedRowsError, match="changes pixel_values, and which of them belong to which"):
        collated(pixel_values=torch.zeros(1))


def test_images_that_come_after_the_check_are_refused():
    data = vision_pairs(8, SEED)
    text, images = (data.filter(lambda row, has=has: bool(row["images"]) == has) for has in (False, True))
    trainer = make_trainer("dpo", "ours", **on_images("llava", "dpo"), train_dataset=text, eval_dataset=images)
    with pytest.raises(ValueError, match="has tried no images: shuffle the data"):
        trainer.evaluate()


@pytest.mark.parametrize("limit", [None, 60], ids=["whole", "parts"])
def test_later_edits_are_refused(limit):
    trainer_class = stepping(PaddingFreeDPOTrainer, more_scored)
    with pytest.raises(EditedRowsError, match="more or other tokens to score"):
        run("dpo", "shared", **on_vision_data("dpo"), trainer_class=trainer_class, max_tokens_per_micro_batch=limit)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.trl_1
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("dpo", {"arrange_micro_batches": "tokens"}, "`arrange_micro_batches='tokens'` needs the lengths of all"),
        # In TRL's words
        ("dpo", {"precompute_ref_log_probs": True}, "`precompute_ref_log_probs=True` is not supported for vision data"),
        ("dpo", {"truncation_mode": "keep_end", "max_length": 9}, "truncation_mode='keep_end' is not supported for v"),
        ("dpo", {"pad_to_multiple_of": 8}, "Padding to a multiple of a value is not yet implemented"),
        ("sft", {"packing": True}, "Packing is not supported for vision datasets"),
    ],
)
def test_what_images_rule_out(task, options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        make_trainer(task, "ours", **{**on_vision_data(task), **options})


def test_statistics_over_all_images_are_refused():
    """Equal images are computed once, and would count once."""
    model = make_vision("llava", seed=SEED)[0]
    rules_of_all([model])
    model.model.vision_tower.norm = torch.nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match=r"`vision_tower.norm` takes statistics over all images of a call"):
        rules_of_all([model])


def test_positions_that_are_counted_by_something_unknown_are_refused():
    model, processor = make_vision("llava", seed=SEED)
    collator = VisionPreferenceCollator(processor, padding_free=True, rules=replace(vision_rules(model), patches=4))
    with pytest.raises(ValueError, match="The model counts positions of image tokens in a way that this package does"):
        collator([row for row in vision_pairs(8, SEED) if row["images"]])


@pytest.mark.parametrize("column", ["image", "images"])
def test_the_first_example_with_images_is_found(column):
    pictures = [row["images"] for row in vision_pairs(8, SEED) if row["images"]][:2]
    filled, empty = (pictures, []) if column == "images" else ([images[0] for images in pictures], None)
    data = Dataset.from_list([{column: value, "prompt": "w1"} for value in [empty] * 120 + filled])
    assert [first_with_images(each) for each in (data, data.select([120, 121]), data.select(range(3)))] == [120, 0, 0]


def test_images_as_arrays_are_inverted_within_their_own_range():
    pixels = np.array([[[255, 10, 20]]], dtype=np.uint8)
    with warnings.catch_warnings(action="error"):  # the sum of the largest and the smallest overflows
        assert inverted(pixels).tolist() == [[[10, 255, 245]]]
        assert inverted(pixels[..., :1] // 255 * 0).tolist() == [[[255]]]


def test_another_collator_is_refused_and_the_page_says_where_ours_is():
    page = (ROOT / "docs" / "vision.md").read_text()
    for task in ("sft", "dpo", "kto"):
        collator = vision_collator(TRAINERS[task].task)
        assert f"`{collator.__name__}`" in page
        assert f"`{collator.__module__}`" in page
    with pytest.raises(ValueError, match=f"derives from `{VisionPreferenceCollator.__module__}.VisionPreference"):
        make_trainer("dpo", "ours", **on_vision_data("dpo"), data_collator=lambda examples: examples)


def test_a_cut_image_is_laid_to_max_length():
    dataset = vision_completions(4, SEED, most_images=1)
    late = dataset.map(lambda row: {"prompt": [{"role": "system", "content": "w1 " * 40}, *row["prompt"]]})
    options = {**on_images("llava", "sft"), "train_sampling_strategy": "sequential"}
    for rows, limit, message in (
        (dataset, 3, "`max_length=3` cuts an image"),
        (concatenate_datasets([dataset, late]), 40, r"The current `max_length` \(40\) is too short"),
    ):
        with pytest.raises(ValueError, match=message):
            run("sft", "shared", **{**options, "max_length": limit}, train_dataset=rows)


def test_videos_are_refused():
    collator = VisionPreferenceCollator(make_vision("llava")[1], padding_free=True)
    with (
        patch.object(VisionPreferenceCollator, "rows", lambda self, examples: {"pixel_values_videos": torch.ones(1)}),
        pytest.raises(ValueError, match="`pixel_values_videos`: videos and audio cannot be trained on"),
    ):
        collator([{"images": []}])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("paligemma", "attention is bidirectional"), ("mllama", "cross-attention"), ("llama4", "has no backbone")],
)
def test_architectures_that_cannot_train_on_images(kind, reason):
    model = refused_model(kind)
    assert reason in why_no_images(model)
    with pytest.raises(ValueError, match="cannot train on images without padding"):
        rules_of_all([model])
