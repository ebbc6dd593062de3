"""Images in the trainers that generate: padded TRL beside ours, each distinct image once, and what is refused."""

import os
import random
from functools import partial
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers.utils import is_torchvision_available

from tests.helpers.tiny import make_model, make_tokenizer, score
from tests.helpers.vision import (
    ARCHITECTURES,
    CLOSE,
    IMAGE_ID,
    OPEN,
    VOCABULARY,
    WITHOUT_TORCHVISION,
    make_vision,
    needs_torchvision,
    on_images,
    picture,
    vision_labelled,
    vision_prompts,
)
from tests.runs import PER_MICRO_BATCH, assert_same, compare, make_trainer, run, train
from trl_paddingfree.data.generated import GeneratedImages
from trl_paddingfree.data.vision import VisionUnpairedCollator
from trl_paddingfree.flat.images import VisionRules
from trl_paddingfree.model.vision import vision_rules

SEED = int(os.environ["TRL_PADDINGFREE_SEED"])
BUILDABLE = [kind for kind in ARCHITECTURES if is_torchvision_available() or kind in WITHOUT_TORCHVISION]
# A sample of each run of the tests; `-m models` takes all
SAMPLE = random.Random(SEED).sample(BUILDABLE, 2)
# In how many ways processors stack what belongs to images: by patch, by row, by image, and by tile
STACKED = ["idefics3", "llava_next", *(pytest.param(x, marks=needs_torchvision) for x in ("qwen2_5_vl", "internvl"))]
# TRL fails on prompts of different lengths (Mistral 3), and on several images of one prompt (LLaVA-OneVision)
ALIKE = ("mistral3", "llava_onevision")
DATA = {"kto": vision_labelled, "grpo": vision_prompts, "rloo": vision_prompts, "distillation": vision_prompts}
# Passes of old policy and reference in chunks, several updates of each micro-batch, which hold several prompts
CHUNKS = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}


def assert_architecture(kind):
    for task in ("grpo", "kto", "distillation"):
        if task == "distillation" and kind in ALIKE:
            rows = vision_prompts(8, SEED, most_images=1)
            data = Dataset.from_list([{**row, "prompt": rows[0]["prompt"]} for row in rows if same_size(row, rows[0])])
            data = data.select([i % len(data) for i in range(8)])
        else:
            data = DATA[task](8, SEED, 1 if kind in ALIKE else 2)
        compare(task, partial(on_images, kind, task), data, ("shared",))
    if kind not in ALIKE:
        compare("rloo", partial(on_images, kind, "rloo", lora=True), vision_prompts(8, SEED), ("shared",), **CHUNKS)


def same_size(row, other):
    return row["images"][0].size == other["images"][0].size


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)


@pytest.mark.models
@pytest.mark.parametrize("kind", sorted(set(BUILDABLE)))
def test_every_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_chunks_iterations_and_references_follow_padded_trl(task, kind):
    options = {**CHUNKS, "beta": 0.1, "gradient_checkpointing": True}
    compare(task, partial(on_images, kind, task, lora=True), vision_prompts(8, SEED), **options)


def test_evaluation_padding_to_a_multiple_and_checkpoints_follow_padded_trl(tmp_path):
    options = {"pad_to_multiple_of": 8, "eval_strategy": "steps", "eval_steps": 1, "output_dir": str(tmp_path)}
    options |= {"eval_dataset": vision_prompts(2, SEED + 1), "save_strategy": "steps", "save_steps": 1}
    data, make = vision_prompts(8, SEED), partial(on_images, "gemma3", "grpo")
    whole = compare("grpo", make, data, ("shared",), **options, steps=2).ours
    resumed = make_trainer("grpo", "shared", **make(), train_dataset=data, **options, steps=2)
    train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    weights = dict(resumed.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", STACKED)
def test_rows_of_a_prompt_and_its_images_are_brought_together(kind):
    """One text stands beside many images, and its rows are drawn together with the images' own only."""
    rows = [{**row, "prompt": [{"role": "user", "content": "w1 w2"}]} for row in vision_prompts(8, SEED)]
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_iterations": 2}
    make, data = partial(on_images, kind, "grpo", lora=True), Dataset.from_list(rows)
    padded = run("grpo", "padded", **make(), train_dataset=data, **options)
    together = run("grpo", "shared", **make(), train_dataset=data, arrange_micro_batches="prefix", **options)
    assert_same(padded, together, ignored=(*PER_MICRO_BATCH, "clip_ratio", "sampling/"))
    scattered = run("grpo", "shared", **make(), train_dataset=data, **options)
    assert together.trainer.total_counts().computed < scattered.trainer.total_counts().computed


def test_images_that_stand_in_messages_follow_padded_trl(tmp_path):
    rows = []
    for i, row in enumerate(vision_prompts(8, SEED, most_images=1)):
        row["images"][0].save(tmp_path / f"{i}.png")
        parts = [{"type": "image", "image": str(tmp_path / f"{i}.png")}, {"type": "text", "text": "w1"}]
        rows.append({"prompt": [{"role": "user", "content": parts}]})
    trained = compare("grpo", partial(on_images, "gemma3", "grpo"), Dataset.from_list(rows), ("shared",)).ours
    assert trained.trainer.flat.check.images.kind == "the data's"


def test_batches_without_images_and_streams_follow_padded_trl():
    """Every second prompt has none: TRL takes those that are generated together."""
    rows = [{**row, "images": row["images"] if i % 2 else []} for i, row in enumerate(vision_prompts(8, SEED))]
    make = partial(on_images, "llava", "grpo")
    compare("grpo", make, Dataset.from_list(rows), ("shared",), shuffle_dataset=False)
    compare("grpo", make, Dataset.from_list(rows[1:]).to_iterable_dataset(), ("shared",))


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_mismatched_rows_have_the_images_of_their_prompts(loss_type):
    options = {"loss_type": loss_type, "eval_strategy": "steps", "eval_steps": 1}
    options["eval_dataset"] = vision_labelled(4, SEED + 1)
    compare("kto", partial(on_images, "gemma3", "kto", lora=True), vision_labelled(8, SEED), **options)


# --- images that tools return ---------------------------------------------------------------------------------------


def look(where: str) -> list:
    """
    Look at a picture.

    Args:
        where: Where it is.
    """
    return []


def with_tools(trainer):
    """Has a tool called in each completion: rows of one prompt get equal pictures, or others, or none."""
    generate, drawn = type(trainer)._tokenize_prompts, random.Random(SEED)
    pictures = [picture(drawn).resize((16, 16)) for _ in range(2)]
    ids = [VOCABULARY[OPEN], *[IMAGE_ID] * 4, VOCABULARY[CLOSE]]

    def _generate(prompts):
        prompt_ids, images, _ = generate(trainer, prompts)
        shown = [[pictures[0]], [pictures[0]], [pictures[1]], []]
        tool_images = [shown[i % 4] for i in range(len(prompts))]
        words = [[VOCABULARY[f"w{drawn.randrange(40)}"] for _ in range(drawn.randint(1, 4))] for _ in prompts]
        completions = [[5, *(ids if seen else []), *said] for seen, said in zip(tool_images, words, strict=True)]
        mask = [[1, *[0] * (len(said) - len(word) - 1), *[1] * len(word)] for said, word in zip(completions, words)]
        merged = [(own or []) + seen for own, seen in zip(images or [[]] * len(prompts), tool_images, strict=True)]
        said = [[{"role": "assistant", "content": str(i % 3)}] for i in range(len(prompts))]
        return prompt_ids, completions, mask, said, None, {}, merged, tool_images

    trainer._generate, trainer._image_pad_token_id = _generate, IMAGE_ID
    return trainer


@needs_torchvision
@pytest.mark.parametrize("has_column", [True, False], ids=["beside others", "alone"])
def test_images_that_tools_return_follow_padded_trl(has_column, caplog):
    data = vision_prompts(8, SEED, most_images=1)
    data = data if has_column else data.remove_columns("images")
    trusted, runs = ("supports_tool_calling", "is_chat_template_prefix_preserving", "add_response_schema"), {}
    with mock.patch.multiple("trl.trainer.grpo_trainer", **dict.fromkeys(trusted, lambda processor: processor)):
        for layout in ("padded", "shared"):
            arguments = {**on_images("qwen2_5_vl", "grpo", lora=True), "tools": [look], "max_completion_length": 16}
            runs[layout] = train(with_tools(make_trainer("grpo", layout, train_dataset=data, **arguments)))
    assert_same(runs["padded"], runs["shared"])
    assert f"with {'the data' if has_column else 'made-up'}" in caplog.text
