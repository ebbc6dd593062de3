"""
Train a local model by RLOO on a local file:

    accelerate launch scripts/rloo.py --dataset_name prompts.jsonl --model_name_or_path MODEL \
        --reward_funcs accuracy_reward

Train with TRL's padding, to compare:

    accelerate launch scripts/rloo.py --padding_free false ...
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("rloo")
