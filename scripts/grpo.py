"""
Train a local model by GRPO on a local file:

    accelerate launch scripts/grpo.py --dataset_name prompts.jsonl --model_name_or_path MODEL \
        --reward_funcs accuracy_reward

Train with TRL's padding, to compare:

    accelerate launch scripts/grpo.py --padding_free false ...

Train a 7B model on one 80 GB GPU:

    accelerate launch scripts/grpo.py --config configs/grpo_qwen2_7b_lora.yaml
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("grpo")
