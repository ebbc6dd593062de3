"""Tiny vision-language models of fourteen architectures, their processors, and data with images, made on the spot."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_num2words_available, is_torchvision_available

from tests.helpers.tiny import SEED, SIZES, arguments, text, word_level

WORDS = [f"w{i}" for i in range(40)]
# One special token of each kind, whatever a model calls it
PAD, START, END, IMAGE, OPEN, CLOSE, VIDEO = "<pad>", "<start>", "<end>", "<image>", "<open>", "<close>", "<video>"
_OTHERS = ["<unk>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "[IMG_BREAK]", "[IMG_END]"]
_TILES = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
SPECIAL = [PAD, START, END, IMAGE, OPEN, CLOSE, VIDEO, *_OTHERS, *_TILES]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, "system", "user", "assistant", *WORDS])}
IMAGE_ID = VOCABULARY[IMAGE]
CHAT_TEMPLATE = (
    "{% for m in messages %}<start> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER {% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <end> {% endfor %}{% if add_generation_prompt %}<start> assistant {% endif %}"
)


# What processors call them
_NAMES = {
    **dict.fromkeys(("image_token", "context_image_token"), IMAGE),
    "video_token": VIDEO,
    "audio_token": "[IMG_BREAK]",
    **dict.fromkeys(("boi_token", "vision_start_token", "start_image_token"), OPEN),
    **dict.fromkeys(("eoi_token", "vision_end_token", "end_image_token"), CLOSE),
    **dict.fromkeys(("boa_token", "eoa_token"), "[IMG_END]"),
}
# The text model of every architecture
_TEXT = {**SIZES, "vocab_size": len(VOCABULARY), "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "in_channels": 3,
    "initializer_range": 0.2,
    **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32),
}
# The numbers of rotary frequencies of time, height and width: half of the head size together
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INTERLEAVED = {**_SECTIONS, "mrope_interleaved": True}
_IDS = {"image_token_id": IMAGE_ID, "video_token_id": VOCABULARY[VIDEO]}
_QWEN_IDS = {**_IDS, "vision_start_token_id": VOCABULARY[OPEN], "vision_end_token_id": VOCABULARY[CLOSE]}
_SMALL = {"height": 16, "width": 16}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
_MERGED = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}
_WINDOW_AND_NONE = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Architecture:
    """What is special to an architecture."""

    tower: dict[str, Any]  # configuration of its vision model
    config: dict[str, Any]  # its own
    text: dict[str, Any]  # that of its text model, beside the sizes of all
    images: dict[str, Any]  # options of its image processor
    options: dict[str, Any] = field(default_factory=dict)  # of its processor
    placeholder: str = IMAGE  # what stands for an image in a prompt, before the processor expands it


def _qwen(tower, config=_QWEN_IDS, **text):
    return Architecture({**_QWEN_TOWER, **tower}, config, text, _MERGED, placeholder=f"{OPEN}{IMAGE}{CLOSE}")


_LLAVA = Architecture(
    tower={"model_type": "clip_vision_model", **_TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 16},
    config={"image_token_index": IMAGE_ID, "image_seq_length": 4},
    text={"model_type": "llama"},
    images={"size": _SMALL, "crop_size": _SMALL},
    options={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
)
_IDEFICS3 = Architecture(
    tower={**_TOWER, "image_size": 16, "patch_size": 4},
    config={"image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": 0},
    text={"model_type": "llama"},
    images={"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    options={"image_seq_len": 4},
)
ARCHITECTURES = {
    "qwen2_vl": _qwen({"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1}, rope_parameters=_SECTIONS),
    "qwen2_5_vl": _qwen({"window_size": 16, "fullatt_block_indexes": [1]}, rope_parameters=_SECTIONS),
    "qwen3_vl": _qwen(
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        rope_parameters=_INTERLEAVED,
        num_hidden_layers=3,
    ),
    "qwen3_5": _qwen(
        {"num_position_embeddings": 64},
        rope_parameters=_INTERLEAVED,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "glm4v": _qwen({"image_size": 16}, _IDS, rope_parameters=_SECTIONS),
    "llava": _LLAVA,
    "llava_next": replace(
        _LLAVA,
        config={**_LLAVA.config, **_PINPOINTS},
        images={"size": {"shortest_edge": 16}, "crop_size": _SMALL, **_PINPOINTS},
    ),
    "llava_onevision": Architecture(
        tower=_SIGLIP,
        config={"image_token_index": IMAGE_ID, "video_token_index": VOCABULARY[VIDEO], **_PINPOINTS},
        text={"model_type": "qwen2"},
        images={"size": _SMALL, **_PINPOINTS},
        options={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "internvl": Architecture(
        tower={**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        config={"image_token_id": IMAGE_ID, "image_seq_length": 4, "downsample_ratio": 0.5},
        text={"model_type": "qwen2"},
        images={"size": _SMALL, "crop_to_patches": True, "min_patches": 1, "max_patches": 3},
        options={"image_seq_length": 4},
    ),
    "mistral3": Architecture(
        tower={"model_type": "pixtral", **_TOWER, "image_size": 32, "patch_size": 4, "head_dim": 16},
        config={"image_token_index": IMAGE_ID, "spatial_merge_size": 2},
        text={"model_type": "mistral"},
        images={"size": {"longest_edge": 32}, "patch_size": 8},
        options={"patch_size": 4, "spatial_merge_size": 2, "image_token": IMAGE},
    ),
    "gemma3": Architecture(
        tower=_SIGLIP,
        config={
            "image_token_index": IMAGE_ID,
            "boi_token_index": VOCABULARY[OPEN],
            "eoi_token_index": VOCABULARY[CLOSE],
            "mm_tokens_per_image": 4,
        },
        # A window that is longer than an image and shorter than a row
        text={"layer_types": _WINDOW_AND_NONE, "sliding_window": 8, "query_pre_attn_scalar": 8},
        images={"size": _SMALL},
        options={"image_seq_length": 4},
        placeholder=OPEN,
    ),
    "gemma4": Architecture(
        tower={**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3},
        config={**_IDS, "audio_config": None, "audio_token_id": VOCABULARY["[IMG_BREAK]"]},
        text={
            "layer_types": _WINDOW_AND_NONE,
            "sliding_window": 16,
            "use_bidirectional_attention": "vision",
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": len(VOCABULARY),
        },
        images={"patch_size": 4, "max_soft_tokens": 70},
    ),
}
# These are built in plain PIL
WITHOUT_TORCHVISION = ("llava", "llava_next", "idefics3", "gemma3")
BUILDABLE = [
    kind
    for kind in ARCHITECTURES
    if (is_torchvision_available() or kind in WITHOUT_TORCHVISION)
    and (is_num2words_available() or kind != "smolvlm")  # its processor spells numbers
]
# A sample of each run of the tests; `-m models` takes all
SAMPLE = random.Random(SEED).sample(BUILDABLE, 2)
# TRL fails on prompts of different lengths (Mistral 3), and on several images of one prompt (LLaVA-OneVision)
ALIKE = ("mistral3", "llava_onevision")


def _make_processor(kind):
    if kind not in BUILDABLE:
        pytest.skip(f"what the processor of {kind} needs is not installed")
    architecture, backend = ARCHITECTURES[kind], "torchvision" if is_torchvision_available() else "pil"
    cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    images = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[kind][backend])
    parts = {
        "image_processor": lambda: images(**architecture.images),
        "tokenizer": lambda: word_level([*VOCABULARY], SPECIAL, eos_token=END, extra_special_tokens=_NAMES),
        # Nothing has videos or sounds
        "video_processor": lambda: transformers.Qwen2VLVideoProcessor(),
        "feature_extractor": lambda: transformers.Gemma4AudioFeatureExtractor(),
    }
    template = CHAT_TEMPLATE.replace("PLACEHOLDER", architecture.placeholder)
    made = {name: parts[name]() for name in cls.get_attributes()}
    return cls(**made, chat_template=template, **architecture.options)


def make_vision(kind: str, seed: int = 0) -> tuple[Any, Any]:
    """A tiny model of one of [`ARCHITECTURES`], with random weights, and its processor."""
    architecture = ARCHITECTURES[kind]
    sizes = {**_TEXT, **architecture.text}
    config = AutoConfig.for_model(kind, **architecture.config, vision_config=architecture.tower, text_config=sizes)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # some towers start at zero, or so small that nothing would show
        if parameter.dim() > 1 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model, _make_processor(kind)


def on_images(kind: str, task: str, lora: bool = False) -> dict[str, Any]:
    """What trains a tiny model on images: adapters on every linear layer, the tower's included, or all weights."""
    model, processor = make_vision(kind, SEED)
    given = arguments(task, lora, model, processor, lambda seed: make_vision(kind, SEED + seed)[0])
    if task in ("grpo", "rloo", "distillation"):
        processor.tokenizer.padding_side = "left"  # as TRL loads it; on the right, padded TRL fails or is wrong
    else:
        given["max_length"] = None
    return given


def picture(rng: random.Random) -> Image.Image:
    """Noise, of one of a few sizes."""
    width, height = rng.choice([(16, 16), (32, 16), (16, 32), (24, 24)])
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def vision_pairs(n: int, seed: int, most_images: int = 2) -> Dataset:
    """Preference pairs with no image, one or two; some prompts, and some images, are there twice."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        images = [picture(rng) for _ in range((1, most_images, 0, 1)[i % 4])]
        prompt = text(rng, 1, 8, WORDS)
        if i % 4 == 3:  # the prompt of another row: with its image, or with another one
            prompt = rows[-3]["prompt"][0]["content"]
            images = rows[-3]["images"] if i % 8 == 3 else [picture(rng) for _ in rows[-3]["images"]]
        rows.append(
            {
                "images": images,
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": text(rng, 1, 12, WORDS)}],
                "rejected": [{"role": "assistant", "content": text(rng, 1, 6, WORDS)}],
            }
        )
    return Dataset.from_list(rows)


def vision_completions(n: int, seed: int, most_images: int = 2) -> Dataset:
    """The same as prompts and completions."""
    return vision_pairs(n, seed, most_images).rename_column("chosen", "completion").remove_columns("rejected")


def vision_labelled(n: int, seed: int, most_images: int = 2) -> Dataset:
    """The same, as completions that are desirable or not."""
    return vision_completions(n, seed, most_images).add_column("label", [i % 3 > 0 for i in range(n)])


def vision_prompts(n: int, seed: int, most_images: int = 2) -> Dataset:
    """The same prompts without completions. All have an image, with which TRL takes no prompts without."""
    rows = vision_pairs(2 * n, seed, most_images).select_columns(["images", "prompt"])
    return rows.filter(lambda row: row["images"]).select(range(n))


def vision_prompts_of(kind: str, n: int, seed: int) -> Dataset:
    """Prompts that TRL generates for: of architectures in `ALIKE`, one, with an image each, all of one size."""
    if kind not in ALIKE:
        return vision_prompts(n, seed)
    first, *others = vision_prompts(8, seed, most_images=1)
    rows = [first, *(row for row in others if row["images"][0].size == first["images"][0].size)]
    return Dataset.from_list([{**rows[i % len(rows)], "prompt": first["prompt"]} for i in range(n)])


# For each task, what makes so many rows of its data
VISION_DATA = {
    "dpo": vision_pairs,
    "sft": vision_completions,
    "kto": vision_labelled,
    **dict.fromkeys(("grpo", "rloo", "distillation"), vision_prompts),
}


def on_vision_data(task: str, kind: str = "llava") -> dict[str, Any]:
    """What trains all weights of such a model, with its data."""
    return {**on_images(kind, task), "train_dataset": VISION_DATA[task](8, SEED)}


def vision_messages(n: int, seed: int, most_images: int = 2) -> Dataset:
    """The same as conversations."""
    rows = vision_completions(n, seed, most_images)
    return Dataset.from_list([{"images": row["images"], "messages": row["prompt"] + row["completion"]} for row in rows])
