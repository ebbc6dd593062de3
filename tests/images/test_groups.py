"""Images in the trainers that generate: padded TRL beside ours, each distinct image once, and what is refused."""

import random
from functools import partial
from unittest import mock

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.helpers.tiny import SEED, make_model, make_tokenizer, score
from tests.helpers.vision import (
    ALIKE,
    BUILDABLE,
    CLOSE,
    IMAGE,
    IMAGE_ID,
    OPEN,
    SAMPLE,
    VISION_DATA,
    VOCABULARY,
    make_vision,
    on_images,
    on_vision_data,
    picture,
    vision_labelled,
    vision_prompts,
    vision_prompts_of,
)
from tests.images.test_trainers import images_embedded
from tests.runs import PER_MICRO_BATCH, TOLERANCE, assert_same, compare, make_trainer, run, train
from trl_paddingfree.images.generated import GeneratedImages
from trl_paddingfree.images.rows import VisionRules

# In how many ways processors stack what belongs to images: by patch, by row, by image, and by tile
STACKED = ["idefics3", "llava_next", "qwen2_5_vl", "internvl"]
# Passes of old policy and reference in chunks, several updates of each micro-batch, which hold several prompts
CHUNKS = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}


def assert_architecture(kind):
    for task in ("grpo", "kto", "distillation"):
        if task == "distillation":
            data = vision_prompts_of(kind, 8, SEED)
        else:
            data = VISION_DATA[task](8, SEED, 1 if kind in ALIKE else 2)
        compare(task, partial(on_images, kind, task), data, "shared")
    if kind not in ALIKE:
        compare("rloo", partial(on_images, kind, "rloo", lora=True), vision_prompts(8, SEED), "shared", **CHUNKS)


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)


@pytest.mark.models
@pytest.mark.parametrize("kind", BUILDABLE)
def test_every_architecture_trains_as_with_padding(kind):
    assert_architecture(kind)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", STACKED)
def test_chunks_iterations_and_references_follow_padded_trl(kind):
    options = {**CHUNKS, "beta": 0.1, "gradient_checkpointing": True}
    for task in ("grpo", "rloo"):
        compare(task, partial(on_images, kind, task, lora=True), vision_prompts(8, SEED), **options)


def test_evaluation_padding_to_a_multiple_and_checkpoints_follow_padded_trl(tmp_path):
    options = {"pad_to_multiple_of": 8, "eval_strategy": "steps", "eval_steps": 1, "output_dir": str(tmp_path)}
    options |= {"eval_dataset": vision_prompts(2, SEED + 1), "save_strategy": "steps", "save_steps": 1}
    data, make = vision_prompts(8, SEED), partial(on_images, "gemma3", "grpo")
    whole = compare("grpo", make, data, "shared", TOLERANCE, **options, steps=2).ours
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
    trained = compare("grpo", partial(on_images, "gemma3", "grpo"), Dataset.from_list(rows), "shared").ours
    assert trained.trainer.tried_images.kind == "the data's"


def test_batches_without_images_and_streams_follow_padded_trl():
    """Every second prompt has none: TRL takes those that are generated together."""
    rows = [{**row, "images": row["images"] if i % 2 else []} for i, row in enumerate(vision_prompts(8, SEED))]
    make = partial(on_images, "llava", "grpo")
    compare("grpo", make, Dataset.from_list(rows), "shared", shuffle_dataset=False)
    compare("grpo", make, Dataset.from_list(rows[1:]).to_iterable_dataset(), "shared")


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_mismatched_rows_have_the_images_of_their_prompts(loss_type):
    options = {"loss_type": loss_type, "eval_strategy": "steps", "eval_steps": 1}
    options["eval_dataset"] = vision_labelled(4, SEED + 1)
    compare("kto", partial(on_images, "gemma3", "kto", lora=True), vision_labelled(8, SEED), **options)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("task", ["grpo", "rloo", "distillation", "kto"])
def test_budgets_follow_padded_trl(task, kind):
    """Most rows are longer than the first budget: the decoder runs in slices, and the tower once before them."""
    options = {"gradient_accumulation_steps": 2, "train_dataset": VISION_DATA[task](8, SEED)}
    options |= {} if task in ("kto", "distillation") else {"num_iterations": 2}
    padded = run(task, "padded", **on_images(kind, task, lora=True), **options)
    for budget in ({"max_tokens_per_micro_batch": 24}, {"memory_budget": 8}):
        assert_same(padded, run(task, "shared", **on_images(kind, task, lora=True), **options, **budget))


# --- each image once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["grpo", "rloo", "distillation"])
def test_a_group_computes_its_images_once(task):
    data = vision_prompts(2, SEED, most_images=1)
    if task == "distillation":  # which draws no groups: four prompts of two
        data = data.select([0, 1, 0, 1])
    # Of reference or teacher, and policy
    assert images_embedded(task, "padded", data, 2, lora=True) == [4, 4]
    assert images_embedded(task, "shared", data, 2, lora=True) == [2, 2] if task == "distillation" else [1, 1]


def test_equal_images_are_looked_for_once_in_all_passes_and_iterations(monkeypatch):
    looked, find = [], GeneratedImages.of
    monkeypatch.setattr(GeneratedImages, "of", lambda given: looked.append(len(given["num_images"])) or find(given))
    options = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.1}
    arguments = {**on_images("llava", "grpo", lora=True), "train_dataset": vision_prompts(8, SEED, most_images=1)}
    trainer = run("grpo", "shared", **arguments, **options, steps=2).trainer
    # The rows that are generated together, for old policy and reference; and each of the micro-batches
    assert sorted(looked) == [4, 4, 8]
    trainer._buffered_inputs = None
    assert not len(trainer._known)  # nothing is kept that no pass can ask for


def test_rows_of_a_call_take_their_own_entries():
    """Five rows in calls of three and two: tiles of 2, 0, 2, 1 and 1, of which the third has the first one's."""
    pixels = torch.arange(6.0)[:, None].repeat(1, 2)
    pixels[2:4] = pixels[:2]
    images = GeneratedImages.of({"pixel_values": pixels, "num_images": [1, 0, 1, 1, 1], "num_tiles": [2, 0, 2, 1, 1]})
    first, second = images.next(3, VisionRules(9)), images.next(2, VisionRules(9))
    assert (list(first.sources), list(second.sources)) == ([0, 1, 0], [0, 1])
    assert [[(name, places.tolist()) for name, places in x.kept] for x in (first, second)] == [
        [("pixel_values", [0, 1])]
    ] * 2
    with pytest.raises(ValueError, match="`pixel_values` has 2 entries, and it is not known to which of the 5 rows"):
        GeneratedImages.of({"pixel_values": pixels[:2], "num_images": [1, 0, 1, 1, 1]})


# --- images that tools return ---------------------------------------------------------------------------------------


def look(where: str) -> list:
    """
    Look at a picture.

    Args:
        where: Where it is.
    """
    return []


def any_template_may_call_tools():
    asked = ("supports_tool_calling", "is_chat_template_prefix_preserving", "add_response_schema")
    return mock.patch.multiple("trl.trainer.grpo_trainer", **dict.fromkeys(asked, lambda processor: processor))


def with_tools(trainer):
    """Has a tool called in each completion: rows of one prompt get equal pictures, or others, or none."""
    generate, drawn = type(trainer)._tokenize_prompts, random.Random(SEED)
    pictures = [picture(drawn).resize((16, 16)) for _ in range(2)]
    ids = [VOCABULARY[OPEN], *[IMAGE_ID] * 4, VOCABULARY[CLOSE]]

    def _generate(prompts):
        prompt_ids, images, _ = generate(trainer, prompts)
        rows = []
        for i, own in enumerate(images or [[]] * len(prompts)):
            seen = ([pictures[0]], [pictures[0]], [pictures[1]], [])[i % 4]
            told = ids if seen else []
            words = [VOCABULARY[f"w{drawn.randrange(40)}"] for _ in range(drawn.randint(1, 4))]
            mask = [1, *[0] * len(told), *[1] * len(words)]
            said = [{"role": "assistant", "content": str(i % 3)}]
            rows.append(([5, *told, *words], mask, said, (own or []) + seen, seen))
        completions, masks, said, merged, tool_images = map(list, zip(*rows, strict=True))
        return prompt_ids, completions, masks, said, None, {}, merged, tool_images

    trainer._generate, trainer._image_pad_token_id = _generate, IMAGE_ID
    return trainer


@pytest.mark.parametrize("has_column", [True, False], ids=["beside others", "alone"])
def test_images_that_tools_return_follow_padded_trl(has_column, caplog):
    data = vision_prompts(8, SEED, most_images=1)
    data = data if has_column else data.remove_columns("images")
    runs = {}
    with any_template_may_call_tools():
        for layout in ("padded", "shared"):
            arguments = {**on_images("qwen2_5_vl", "grpo", lora=True), "tools": [look], "max_completion_length": 16}
            runs[layout] = train(with_tools(make_trainer("grpo", layout, train_dataset=data, **arguments)))
    assert_same(runs["padded"], runs["shared"])
    assert f"with {'the data' if has_column else 'made-up'}" in caplog.text


# --- what is refused -------------------------------------------------------------------------------------------------


def test_images_that_were_never_tried_are_refused():
    """Text is trained on, and the images of a later prompt are not."""
    text = {"images": [], "prompt": [{"role": "user", "content": "w1"}]}
    late = Dataset.from_list([text] * 300 + [*vision_prompts(2, SEED)])
    arguments = {**on_images("llava", "grpo"), "shuffle_dataset": False}
    with pytest.raises(ValueError, match="The first examples of the train data have no images"):
        make_trainer("grpo", "shared", **arguments, train_dataset=late.to_iterable_dataset())
    trainer = make_trainer("grpo", "shared", **arguments, train_dataset=late.remove_columns("images"))
    trainer.train_dataset = late.select(range(300, 302))
    with pytest.raises(ValueError, match="The rows come with `pixel_values`, and the start-up check has tried no im"):
        trainer.train()


def test_calls_of_the_model_beside_trls_passes_are_refused():
    trainer = make_trainer("grpo", "shared", **on_vision_data("grpo"))
    ids = torch.tensor([[1, IMAGE_ID, 40, 41]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    knows_none = pytest.raises(ValueError, match="The call has `pixel_values`, and its flat batch knows of no images")
    with trainer.runtime.trained.flattening(trainer.flatten), knows_none:
        trainer.model(**rows, pixel_values=torch.ones(1, 3, 16, 16), fused_lm_head=True)


def test_a_teacher_with_other_rules_of_images_is_refused():
    arguments = {**on_vision_data("distillation"), "teacher_model": make_vision("gemma3")[0]}
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration and LlavaForCond.* by other rules"):
        make_trainer("distillation", "shared", **arguments)


def test_images_for_a_text_model_are_refused():
    text = {"model": make_model(), "processing_class": make_tokenizer(), "reward_funcs": score}
    with pytest.raises(ValueError, match="`processing_class` is a .*, which reads text only"):
        make_trainer("grpo", "shared", **text, train_dataset=vision_prompts(4, SEED))


def test_a_model_that_does_not_look_at_its_images_is_refused(monkeypatch):
    arguments = on_vision_data("grpo")
    backbone = arguments["model"].model
    monkeypatch.setattr(backbone.multi_modal_projector, "forward", lambda x: torch.zeros(*x.shape[:-1], 32))
    with pytest.raises(ValueError, match="images make no difference to the model: they never arrive"):
        make_trainer("grpo", "shared", **arguments)


def saying(monkeypatch, image_tokens):
    """Has each completion say image tokens in front, as many as `image_tokens` has for the row, again and again."""
    generate = GRPOTrainer._generate_single_turn

    def _generate_single_turn(self, *args, **kwargs):
        said, others = generate(self, *args, **kwargs)
        return [[IMAGE_ID] * image_tokens[i % len(image_tokens)] + ids for i, ids in enumerate(said)], others

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", _generate_single_turn)


@pytest.mark.parametrize(
    ("kind", "image_tokens"),
    [("llava", [0, 1, 0, 0]), ("llava", [12]), ("qwen2_5_vl", [1])],
    ids=["one row", "images more", "all rows"],
)
def test_sampled_image_tokens_are_named_where_padded_trl_fails(kind, image_tokens, monkeypatch):
    """TRL suppresses them, unless `generation_kwargs` or vLLM do otherwise."""
    saying(monkeypatch, image_tokens)
    small = [{**row, "images": [image.resize((16, 16)) for image in row["images"]]} for row in vision_prompts(4, SEED)]
    for layout in ("padded", "shared"):
        trainer = make_trainer("grpo", layout, **on_images(kind, "grpo"), train_dataset=Dataset.from_list(small))
        named = "a completion has image tokens .*beside those of its images" if layout == "shared" else ""
        with pytest.raises(ValueError, match=f"Image features and image tokens do not match.*{named}"):
            trainer.train()


def test_sampled_image_tokens_are_text_in_batches_without_images(monkeypatch):
    saying(monkeypatch, [0, 2, 1])
    rows = [{**row, "images": row["images"] if i > 1 else []} for i, row in enumerate(vision_prompts(4, SEED))]
    make = partial(on_images, "qwen2_5_vl", "grpo")
    compare("grpo", make, Dataset.from_list(rows), "shared", shuffle_dataset=False)


@pytest.mark.parametrize("fault", ["model", "template"])
def test_tools_beside_text_train_where_made_up_images_cannot_be_tried(fault, monkeypatch, caplog):
    """By a model that cannot take images from a flat row, or with a template that drops them."""
    text = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{i}"}]} for i in range(8)])
    if fault == "model":
        monkeypatch.setattr("trl_paddingfree.images.trainers.why_no_images", lambda model: "so it is")
    with any_template_may_call_tools():
        arguments = {**on_images("llava", "grpo"), "tools": [look]}
        if fault == "template":
            processor = arguments["processing_class"]
            processor.chat_template = processor.chat_template.replace(IMAGE, "")
        trainer = make_trainer("grpo", "shared", **arguments, train_dataset=text)
    assert trainer.tried_images is None
    assert ("Made-up images cannot be tried" in caplog.text) == (fault == "template")
    with pytest.raises(ValueError, match="The rows come with `pixel_values`, and the start-up check has tried no im"):
        trainer._get_per_token_logps_and_entropies(trainer.model, None, None, 2, pixel_values=torch.zeros(1))
