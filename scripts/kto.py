"""
Train a local model by KTO on a local file:

    accelerate launch scripts/kto.py --dataset_name unpaired.jsonl --model_name_or_path MODEL

Train with TRL's padding, to compare:

    accelerate launch scripts/kto.py --padding_free false ...
"""

from trl_paddingfree.cli.train import main

if __name__ == "__main__":
    main("kto")
