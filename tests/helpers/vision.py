"""Tiny vision-language models of fourteen architectures, their processors, and data with images, made on the spot."""

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

from tests.helpers.tiny import score, word_level

SEED = int(os.environ.get("TRL_PADDINGFREE_SEED", 0))
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


def make_tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose special tokens need no spaces around them."""
    return word_level([*VOCABULARY], SPECIAL, eos_token=END, extra_special_tokens=named)


def text_sizes(**more: Any) -> dict[str, Any]:
    """The text model of every architecture. Weights are larger than usual, so that a wrong context shows."""
    return {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": 1,
    } | more


TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
CLIP = {"model_type": "clip_vision_model", **TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 16}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "in_channels": 3, "initializer_range": 0.2}
# The numbers of rotary frequencies of time, height and width: half of the head size together
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VOCABULARY[VIDEO],
    "vision_start_token_id": VOCABULARY[OPEN],
    "vision_end_token_id": VOCABULARY[CLOSE],
}
_NAMED = {"image_token": IMAGE, "video_token": VIDEO, "boi_token": OPEN, "eoi_token": CLOSE}
_SMALL = {"height": 16, "width": 16}
_PINPOINTS = [[16, 32], [32, 16]]
Made = tuple[dict[str, Any], Callable[[Any], Any]]


def _pick(name: str) -> Any:
    """An image processor, in plain PIL where there is no torchvision."""
    return getattr(transformers, name if is_torchvision_available() else f"{name}Pil")


def _llava(kind: str) -> Made:
    sizes = {"size": _SMALL, "crop_size": _SMALL}
    options: dict[str, Any] = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    config: dict[str, Any] = {"vision_config": CLIP, "image_token_index": IMAGE_ID, "image_seq_length": 4}
    if kind == "llava_next":
        sizes |= {"size": {"shortest_edge": 16}, "image_grid_pinpoints": _PINPOINTS}
        config["image_grid_pinpoints"] = _PINPOINTS
    name = "Llava" if kind == "llava" else "LlavaNext"

    def processor(template):
        images = _pick(f"{name}ImageProcessor")(**sizes)
        cls = getattr(transformers, f"{name}Processor")
        return cls(images, make_tokenizer(), num_additional_image_tokens=1, chat_template=template, **options)

    return {**config, "text_config": text_sizes(model_type="llama")}, processor


def _llava_onevision() -> Made:
    config = {"vision_config": SIGLIP, "image_token_index": IMAGE_ID, "video_token_index": VOCABULARY[VIDEO]}
    config |= {"image_grid_pinpoints": _PINPOINTS, "text_config": text_sizes(model_type="qwen2")}

    def processor(template):
        images = transformers.LlavaOnevisionImageProcessor(size=_SMALL, image_grid_pinpoints=_PINPOINTS)
        return transformers.LlavaOnevisionProcessor(
            images,
            make_tokenizer(),
            transformers.LlavaOnevisionVideoProcessor(),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=template,
        )

    return config, processor


def _idefics3(kind: str) -> Made:
    tower = {**TOWER, "image_size": 16, "patch_size": 4}
    config = {"vision_config": tower, "image_token_id": IMAGE_ID, "scale_factor": 2, "pad_token_id": 0}
    name = "Idefics3" if kind == "idefics3" else "SmolVLM"

    def processor(template):
        images = _pick(f"{name}ImageProcessor")(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        cls = getattr(transformers, f"{name}Processor")
        more = () if kind == "idefics3" else (transformers.SmolVLMVideoProcessor(),)
        return cls(images, make_tokenizer(), *more, image_seq_len=4, chat_template=template)

    return {**config, "text_config": text_sizes(model_type="llama")}, processor


def _internvl() -> Made:
    tower = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
    config = {"vision_config": tower, "image_token_id": IMAGE_ID, "image_seq_length": 4, "downsample_ratio": 0.5}

    def processor(template):
        named = {"start_image_token": OPEN, "end_image_token": CLOSE, "context_image_token": IMAGE}
        images = transformers.GotOcr2ImageProcessor(size=_SMALL, crop_to_patches=True, min_patches=1, max_patches=3)
        return transformers.InternVLProcessor(
            images,
            make_tokenizer(**named, video_token=VIDEO),
            transformers.InternVLVideoProcessor(),
            image_seq_length=4,
            chat_template=template,
        )

    return {**config, "text_config": text_sizes(model_type="qwen2")}, processor


def _mistral3() -> Made:
    tower = {"model_type": "pixtral", **TOWER, "image_size": 32, "patch_size": 4, "head_dim": 16}
    config = {"vision_config": tower, "image_token_index": IMAGE_ID, "spatial_merge_size": 2}

    def processor(template):
        images = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8)
        return transformers.PixtralProcessor(
            images, make_tokenizer(), patch_size=4, spatial_merge_size=2, image_token=IMAGE, chat_template=template
        )

    return {**config, "text_config": text_sizes(model_type="mistral")}, processor


def _gemma3() -> Made:
    kinds = ["sliding_attention", "full_attention"]
    config = {
        "vision_config": SIGLIP,
        "image_token_index": IMAGE_ID,
        "boi_token_index": VOCABULARY[OPEN],
        "eoi_token_index": VOCABULARY[CLOSE],
        "mm_tokens_per_image": 4,
        # A window that is longer than an image and shorter than a row
        "text_config": text_sizes(layer_types=kinds, sliding_window=8, query_pre_attn_scalar=8),
    }

    def processor(template):
        images = _pick("Gemma3ImageProcessor")(size=_SMALL)
        return transformers.Gemma3Processor(
            images, make_tokenizer(**_NAMED), image_seq_length=4, chat_template=template
        )

    return config, processor


def _gemma4() -> Made:
    kinds = ["sliding_attention", "full_attention"]
    options = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(VOCABULARY)}
    config = {
        "vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3},
        "text_config": text_sizes(
            layer_types=kinds, sliding_window=16, use_bidirectional_attention="vision", global_head_dim=8, **options
        ),
        "audio_config": None,
        "image_token_id": IMAGE_ID,
        "video_token_id": VOCABULARY[VIDEO],
        "audio_token_id": VOCABULARY["[IMG_BREAK]"],
    }

    def processor(template):
        images = transformers.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70)
        return transformers.Gemma4Processor(
            transformers.Gemma4AudioFeatureExtractor(),
            images,
            make_tokenizer(**_NAMED, audio_token="[IMG_BREAK]", boa_token="[IMG_END]", eoa_token="[IMG_END]"),
            transformers.Gemma4VideoProcessor(),
            chat_template=template,
        )

    return config, processor


def _qwen(kind: str) -> Made:
    tower, more = dict(_QWEN_TOWER), {}
    if kind == "qwen2_vl":
        tower |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1}
    else:
        tower |= {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if kind == "qwen3_vl":
        tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        more = {"num_hidden_layers": 3}
    if kind == "qwen3_5":
        tower |= {"num_position_embeddings": 64}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        more = {"layer_types": ["linear_attention", "full_attention"], **heads}
    sections = {**_SECTIONS, "mrope_interleaved": True} if kind.startswith("qwen3") else _SECTIONS
    config = {"vision_config": tower, **_QWEN_TOKENS, "text_config": text_sizes(rope_parameters=sections, **more)}
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(kind, "Qwen3VL")

    def processor(template):
        images = transformers.Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        video = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
        cls = getattr(transformers, f"{name}Processor")
        named = {"vision_start_token": OPEN, "vision_end_token": CLOSE}
        return cls(images, make_tokenizer(**_NAMED, **named), video(), chat_template=template)

    return config, processor


def _glm4v() -> Made:
    tower = {**_QWEN_TOWER, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "image_size": 16}
    config = {"vision_config": tower, "image_token_id": IMAGE_ID, "video_token_id": VOCABULARY[VIDEO]}

    def processor(template):
        images = transformers.Glm4vImageProcessor(
            patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        video = transformers.Glm4vVideoProcessor()
        return transformers.Glm4vProcessor(images, make_tokenizer(**_NAMED), video, chat_template=template)

    return {**config, "text_config": text_sizes(rope_parameters=_SECTIONS)}, processor


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "qwen3_5": lambda: _qwen("qwen3_5"),
    "glm4v": _glm4v,
    "llava": lambda: _llava("llava"),
    "llava_next": lambda: _llava("llava_next"),
    "llava_onevision": _llava_onevision,
    "idefics3": lambda: _idefics3("idefics3"),
    "smolvlm": lambda: _idefics3("smolvlm"),
    "internvl": _internvl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
needs_torchvision = pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
# These are built in plain PIL
WITHOUT_TORCHVISION = ("llava", "llava_next", "idefics3", "gemma3")
BUILDABLE = [kind for kind in ARCHITECTURES if is_torchvision_available() or kind in WITHOUT_TORCHVISION]
# A sample of each run of the tests; `-m models` takes all
SAMPLE = random.Random(SEED).sample(BUILDABLE, 2)
# What stands for an image in a prompt, before the processor expands it
_PLACEHOLDERS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"), f"{OPEN}{IMAGE}{CLOSE}")
_PLACEHOLDERS |= {"gemma3": OPEN}


def placeholder(kind: str) -> str:
    """What stands for an image in a prompt."""
    return _PLACEHOLDERS.get(kind, IMAGE)


def make_vision(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **text_options: Any) -> tuple[Any, Any]:
    """
    A tiny model with random weights, and its processor.

    Args:
        kind (`str`):
            One of [`ARCHITECTURES`].
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the weights.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.
        **text_options:
            What goes before the sizes of the text model.
    """
    config, processor = ARCHITECTURES[kind]()
    config["text_config"] |= text_options
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **config)).to(dtype)
    for parameter in model.parameters():  # some towers start at zero, or so small that nothing would show
        if parameter.dim() > 1 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model, processor(CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder(kind)))


def on_images(kind: str, task: str, lora: bool = False, seed: int = SEED) -> dict[str, Any]:
    """What trains a tiny model on images: adapters on every linear layer, the tower's included, or all weights."""
    model, processor = make_vision(kind, seed=seed)
    arguments = {"model": model, "processing_class": processor}
    if task in ("grpo", "rloo", "distillation"):
        processor.tokenizer.padding_side = "left"  # as TRL loads it; on the right, padded TRL fails or is wrong
    if task in ("grpo", "rloo"):
        arguments["reward_funcs"] = score
    elif task == "distillation":
        arguments["teacher_model"] = make_vision(kind, seed=seed + 1)[0]
    else:
        arguments["max_length"] = None
    if lora:
        arguments["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    elif task in ("dpo", "kto"):
        arguments["ref_model"] = make_vision(kind, seed=seed + 1)[0]
    return arguments


def picture(rng: random.Random) -> Image.Image:
    """Noise, of one of a few sizes."""
    width, height = rng.choice([(16, 16), (32, 16), (16, 32), (24, 24)])
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def _words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def vision_pairs(n: int, seed: int, most_images: int = 2) -> Dataset:
    """Preference pairs with no image, one or two; some prompts, and some images, are there twice."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        images = [picture(rng) for _ in range((1, most_images, 0, 1)[i % 4])]
        prompt = _words(rng, 8)
        if i % 4 == 3:  # the prompt of another row: with its image, or with another one
            prompt = rows[-3]["prompt"][0]["content"]
            images = rows[-3]["images"] if i % 8 == 3 else [picture(rng) for _ in rows[-3]["images"]]
        rows.append(
            {
                "images": images,
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": _words(rng, 12)}],
                "rejected": [{"role": "assistant", "content": _words(rng, 6)}],
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


def vision_messages(n: int, seed: int, most_images: int = 2) -> Dataset:
    """The same as conversations."""
    rows = vision_completions(n, seed, most_images)
    return Dataset.from_list([{"images": row["images"], "messages": row["prompt"] + row["completion"]} for row in rows])
