"""
Distill a local teacher into a local student on a local file:

    accelerate launch scripts/distillation.py --dataset_name prompts.jsonl --model_name_or_path MODEL \
        --teacher_model_name_or_path TEACHER

Train with TRL's padding, to compare:

    accelerate launch scripts/distillation.py --padding_free false ...

Distill a 14B model into a 7B model on one 80 GB GPU:

    accelerate launch scripts/distillation.py --config configs/distillation_qwen2.5_7b_lora.yaml
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("distillation")
