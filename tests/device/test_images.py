"""Images of generated rows, and of KTO's mismatched ones, on another device: found, cut and computed as on the CPU."""

import pytest

from tests.device.runs import SEED, assert_as_on_cpu
from tests.helpers.vision import needs_torchvision, on_images, vision_labelled, vision_prompts
from tests.runs import run


@pytest.mark.parametrize("task", ["kto", "grpo", "distillation"])
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_5_vl", marks=needs_torchvision)])
def test_images_of_groups(task, kind):
    data = (vision_labelled if task == "kto" else vision_prompts)(8, SEED)
    options = {"beta": 0.1, "num_iterations": 2} if task == "grpo" else {}
    assert_as_on_cpu(lambda: run(task, "shared", **on_images(kind, task, lora=True), train_dataset=data, **options))
